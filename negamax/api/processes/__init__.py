"""Several server processes in front of one engine (`--api-server-count`)."""
