"""Send tokens to experts on other ranks, and return the experts' outputs."""
