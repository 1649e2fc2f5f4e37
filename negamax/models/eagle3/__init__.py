"""EAGLE3 drafts: small Llamas that guess tokens from the residual streams of another model."""
