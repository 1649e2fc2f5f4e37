"""Checkpoints: finding, checking, reading and loading them."""
