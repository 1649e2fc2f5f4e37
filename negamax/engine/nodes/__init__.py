"""Engines whose ranks run on several machines."""
