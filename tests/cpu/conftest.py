"""Ranks and grammar processes of these tests are forked."""

from tests.forked_children import forked_children

__all__ = ["forked_children"]
