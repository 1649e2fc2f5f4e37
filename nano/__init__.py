"""Training of the four embedded models: data, training loops, export and measurement."""
