"""Descriptions of weight formats and devices. This package does not import torch."""
