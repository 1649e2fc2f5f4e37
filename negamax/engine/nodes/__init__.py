"""Engines whose ranks are spread over several machines."""
