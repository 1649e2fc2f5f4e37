"""Accuracy suites for the bundled models."""
