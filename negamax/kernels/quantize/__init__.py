"""Conversions between a plain and a quantized tensor."""
