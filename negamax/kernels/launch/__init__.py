"""Launching of kernels, and functions that several families of kernels call."""
