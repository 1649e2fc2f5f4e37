"""Send tokens to experts on other ranks, and the results back."""
