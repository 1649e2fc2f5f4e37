"""Train, export and measure the four built-in models."""
