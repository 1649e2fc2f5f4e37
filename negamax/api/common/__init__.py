"""Code that all APIs use, from the parsed request to the events of the answer."""
