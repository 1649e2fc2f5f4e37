"""Sums over ranks, fused with the residual add and the norm after them."""
