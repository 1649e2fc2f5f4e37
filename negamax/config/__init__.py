"""Options, the model specification and what they check: frozen and pure."""
