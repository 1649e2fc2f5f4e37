"""Block drafts, DSpark and DFlash: small decoders that propose several tokens in one pass."""
