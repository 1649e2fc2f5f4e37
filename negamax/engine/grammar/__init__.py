"""Structured output: grammar bitmasks, computed in a separate process."""
