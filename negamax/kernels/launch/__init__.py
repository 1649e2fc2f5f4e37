"""Functions that launch kernels, and functions that several families of kernels call."""
