"""Code that the dialects share: from a parsed request to the events of its answer."""
