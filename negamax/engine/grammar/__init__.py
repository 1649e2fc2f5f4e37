"""Grammars: which tokens may come next, computed in a process of its own."""
