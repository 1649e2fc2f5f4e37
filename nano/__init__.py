"""Train, export and measure the four embedded models."""
