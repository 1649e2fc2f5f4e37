"""Formats of stored weights and kinds of devices, as data. This package does not import torch."""
