"""Sums over ranks, fused with what follows them."""
