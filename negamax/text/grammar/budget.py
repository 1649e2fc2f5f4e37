"""Limits the size of a request's schemas once their references are expanded, and notes risks."""

from collections.abc import Iterator
from contextlib import contextmanager

from negamax.base.errors import InvalidRequestError
from negamax.config.grammar import refuse_grammar

MAX_NODES = 50_000
MAX_BYTES = 4 << 20
RISKY_BYTES = 512 << 10  # in a structural tag; 80 KB of tool schemas give so many
RISKY_CHOICES = 64 << 10  # bytes of choices
RISKY_LEVELS = 1000  # levels of nested rules
RISKY_LITERAL = 16 << 10  # characters of a literal
RISKY_FORMATS = 200  # formats of one client
MAX_REFUSALS = 8  # tools of a request whose schemas may turn out too large


class Budget:
    """Limit of the expanded schemas of a request: references let small ones become large."""

    def __init__(self) -> None:
        self._nodes = 0
        self._bytes = 0
        self._refusals = 0
        # whether to compile the grammar may take long, or end the process
        self.is_risky = False
        self._formats = 0

    @contextmanager
    def restore_on_refusal(self, *, is_final: bool) -> Iterator[list[str]]:
        """Catch a refusal unless `is_final`, put it into the list, and return what was spent.

        A few times at most: then the budget is spent, and each further attempt is refused at once.
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
        """Note a part of a client's structural tag; many may be alternatives at one place."""
        self._formats += 1
        self.is_risky |= not is_harmless or self._formats > RISKY_FORMATS

    def spend(self, nodes: int = 1, *, num_bytes: int = 0) -> None:
        """Spend before expanding. Errors: `InvalidRequestError` above the limits."""
        self._nodes += nodes
        self._bytes += num_bytes
        if self._nodes > MAX_NODES:
            refuse_grammar(
                f"the schemas come to more than {MAX_NODES} nodes once expanded; send fewer or "
                f"simpler ones"
            )
        if self._bytes > MAX_BYTES:
            refuse_grammar(
                f"the schemas come to more than {MAX_BYTES} bytes once expanded; send fewer or "
                f"simpler ones"
            )
