"""Sample the next token from logits."""
