"""Tokens to the experts of other ranks, and what these made of them back."""
