"""Quantization methods, one file per method. A method returns the stored format of each module."""
