"""Fork the ranks and grammar processes of these tests."""

from tests.forked_children import forked_children

__all__ = ["forked_children"]
