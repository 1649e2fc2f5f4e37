"""Kernels that multiply 4-bit and 8-bit weights on GPUs and dequantize them in registers."""
