"""The paged key/value cache."""
