"""Errors, logging and the door to the environment."""
