"""Code that all API dialects share, from the parsed request to the events of the answer."""
