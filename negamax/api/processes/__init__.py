"""Several server processes in front of one engine (`--api-server-count`): the first leads, the
others follow it.
"""
