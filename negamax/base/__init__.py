"""Errors, logging, environment, child processes."""
