"""Code of server processes that connects to engines, sends requests and supervises engines."""
