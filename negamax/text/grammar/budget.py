"""Limit the size of a request's schemas after their references are expanded."""

from collections.abc import Iterator
from contextlib import contextmanager

from negamax.base.errors import InvalidRequestError
from negamax.config.grammar import refuse_grammar

MAX_NODES = 50_000
MAX_BYTES = 4 << 20
# Compiling a grammar beyond one of these sizes may take long or crash the process.
RISKY_BYTES = 512 << 10  # bytes of a structural tag; 80 KB of tool schemas can expand to this size
RISKY_CHOICES = 64 << 10  # bytes of all strings in a choice grammar
RISKY_LEVELS = 1000  # levels of nested rules
RISKY_LITERAL = 16 << 10  # characters of a literal
RISKY_FORMATS = 200  # formats in a client's structural tag
MAX_REFUSALS = 8  # number of the first refused schema whose cost is not refunded


class Budget:
    """Counts nodes and bytes of a request's expanded schemas. References can make schemas large."""

    def __init__(self) -> None:
        self._nodes = 0
        self._bytes = 0
        self._refusals = 0
        self.is_risky = False  # whether compiling the grammar may take long or crash the process
        self._formats = 0

    @contextmanager
    def restore_on_refusal(self, *, is_final: bool) -> Iterator[list[str]]:
        """Catch a refusal in the `with` block, keep its message, and refund the cost of the block.

        If `is_final`, raise the refusal again instead. From refusal number `MAX_REFUSALS` on, costs
        are not refunded, so that many large schemas together exceed the budget.
        """
        spent, refusals = (self._nodes, self._bytes), list[str]()
        try:
            yield refusals
        except (InvalidRequestError, RecursionError) as error:
            if is_final:
                raise
            refusals.append(str(error))
            self._refusals += 1
            if self._refusals < MAX_REFUSALS:
                self._nodes, self._bytes = spent

    def note_format(self, *, is_harmless: bool) -> None:
        """Count a format of a client's structural tag. A tag with many formats compiles slowly."""
        self._formats += 1
        self.is_risky |= not is_harmless or self._formats > RISKY_FORMATS

    def spend(self, nodes: int = 1, *, num_bytes: int = 0) -> None:
        """Add `nodes` and `num_bytes` to the counts. Raises `InvalidRequestError` if the number of
        nodes exceeds `MAX_NODES`, or the number of bytes exceeds `MAX_BYTES`.
        """
        self._nodes += nodes
        self._bytes += num_bytes
        if self._nodes > MAX_NODES or self._bytes > MAX_BYTES:
            most = f"{MAX_NODES} nodes" if self._nodes > MAX_NODES else f"{MAX_BYTES} bytes"
            refuse_grammar(
                f"the schemas have more than {most} after references are expanded; "
                f"send fewer or simpler schemas"
            )
