"""Quantization methods, one file each. A method finds the stored format of every module."""
