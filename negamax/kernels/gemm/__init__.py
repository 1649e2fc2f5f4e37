"""GEMMs with weights."""
