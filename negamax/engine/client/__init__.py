"""Connect server processes to engines, send requests to engines, and supervise engines."""
