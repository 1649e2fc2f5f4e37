"""Mixture of experts: routing and the expert networks."""
