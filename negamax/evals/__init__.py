"""Accuracy suites of the embedded models."""
