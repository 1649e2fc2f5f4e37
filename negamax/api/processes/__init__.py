"""Several server processes in front of one engine (`--api-server-count`): the first supervises, the
others follow it.
"""
