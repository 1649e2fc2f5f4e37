"""Decides which tokens run in which step: plain Python, no torch, no I/O, no clock."""
