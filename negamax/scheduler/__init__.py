"""Decide which tokens run in which step. The package uses no torch, no I/O and no clock."""
