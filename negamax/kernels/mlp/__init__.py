"""What an MLP computes between its products."""
