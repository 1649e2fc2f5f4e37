"""Weights of 4 and 8 bits as GPUs multiply with them: dequantised tile by tile, in registers."""
