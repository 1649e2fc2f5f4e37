"""EAGLE3 draft models: small Llamas that propose tokens from the residual streams of a target."""
