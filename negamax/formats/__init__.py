"""Formats of stored weights and kinds of devices, as data. Imports no torch."""
