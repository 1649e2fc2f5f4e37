"""Accuracy suites, and the bundled model's own."""
