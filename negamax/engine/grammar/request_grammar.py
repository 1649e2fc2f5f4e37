"""What one output must follow: its grammar, as far as the process has answered, and the end of its
reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from negamax.engine.grammar import wire
from negamax.engine.grammar.client import GrammarClient
from negamax.engine.grammar.masks import Mask
from negamax.scheduler.request import GenerateRequest
from negamax.text.grammar.reasoning_gate import ReasoningGate


@dataclass(eq=False)
class RequestGrammar:
    """What one output must follow."""

    request: GenerateRequest
    key: int  # its name in the grammar process
    gate: ReasoningGate | None = None
    client: GrammarClient | None = None
    is_open: bool = False  # as far as the grammar is concerned
    refusal: str | None = None  # why it cannot be served, where that is the request's own fault
    attempts: int = 0
    # of the grammar: after all parts it has answered to, then behind draft tokens
    masks: list[Mask] = field(default_factory=list)
    # that the next step may verify, -1: none
    drafts: list[int] = field(default_factory=list)
    num_asked: int = 0  # advances without an answer
    asked: float = 0.0  # monotonic seconds, of the latest opening or advance
    kept_back: frozenset[int] = frozenset()  # tokens that must not come within an open reasoning
    has_ended: bool = False
    error: str | None = None
    is_lost: bool = False  # the error is that its process is gone
    is_late: bool = False  # a step went without it

    @property
    def problem(self) -> str | None:
        """Why the request cannot be served."""
        return self.refusal or self.error

    @property
    def is_reasoning(self) -> bool:
        """Whether the grammar has not begun yet."""
        return self.is_reasoning_at(self.gate)

    @property
    def is_awaited(self) -> bool:
        """Whether the next token depends on an answer of the grammar process."""
        if self.num_asked == 0 or self.problem is not None or self.has_ended:
            return False
        return not self.is_reasoning and (self.gate is None or self.gate.due is None)

    def is_reasoning_at(self, gate: ReasoningGate | None) -> bool:
        """The same, behind what `gate` has seen."""
        reasoning = self.request.sampling.reasoning
        return (
            gate is not None
            and gate.is_open
            and reasoning is not None
            and reasoning.state == "open"
        )

    def push(self, token_id: int) -> int | bytes | None:
        """Take a committed token; what of it belongs to the content."""
        return token_id if self.gate is None else self.gate.push(token_id)

    def take(self, answer: wire.NextMask) -> None:
        """Take what the grammar process answers to an advance."""
        self.num_asked -= 1
        if answer.error is not None and answer.mask is not None:
            self.refusal = answer.error
        elif answer.error is not None:
            self.error = answer.error
        elif answer.mask is None:
            self.has_ended = True
        else:
            masks = answer.mask, *answer.behind_drafts
            self.masks = [np.frombuffer(mask, dtype=np.uint8) for mask in masks]
