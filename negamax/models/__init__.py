"""Model families, each written straight from top to bottom, and the registry that builds one from
its spec.
"""
