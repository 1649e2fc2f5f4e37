"""Quantised weight formats: how a weight is stored and turned into what the layers use."""
