"""Weights of 4 and 8 bits on GPUs: dequantized tile by tile in registers when multiplied."""
