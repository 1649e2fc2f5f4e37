"""Conversions between a plain and a quantised tensor."""
