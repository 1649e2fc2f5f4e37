"""The constraints of one output: its grammar and the end of its reasoning."""

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
    """The constraints of one output, based on the grammar process's answers so far."""

    request: GenerateRequest
    key: int  # its key in the grammar process
    gate: ReasoningGate | None = None
    client: GrammarClient | None = None
    is_open: bool = False  # the grammar is compiled, or there is none
    refusal: str | None = None  # why the request is invalid
    attempts: int = 0
    # of the grammar: after all answered parts, then after each draft token
    masks: list[Mask] = field(default_factory=list)
    # draft tokens that the next step may verify; -1: none
    drafts: list[int] = field(default_factory=list)
    num_asked: int = 0  # advances without an answer
    asked: float = 0.0  # monotonic seconds, of the latest open or advance
    kept_back: frozenset[int] = frozenset()  # tokens forbidden during reasoning
    has_ended: bool = False
    error: str | None = None
    is_lost: bool = False  # lost by the end of its process
    is_late: bool = False  # a step ran without its mask

    @property
    def problem(self) -> str | None:
        """Why the request cannot be served."""
        return self.refusal or self.error

    @property
    def is_reasoning(self) -> bool:
        """Whether the grammar has not started yet."""
        return self.is_reasoning_at(self.gate)

    @property
    def is_awaited(self) -> bool:
        """Whether the next token depends on an outstanding answer."""
        if self.num_asked == 0 or self.problem is not None or self.has_ended:
            return False
        return not self.is_reasoning and (self.gate is None or self.gate.due is None)

    def is_reasoning_at(self, gate: ReasoningGate | None) -> bool:
        """Whether the grammar has not started yet after the tokens that `gate` has read."""
        reasoning = self.request.sampling.reasoning
        return (
            gate is not None
            and gate.is_open
            and reasoning is not None
            and reasoning.state == "open"
        )

    def push(self, token_id: int) -> int | bytes | None:
        """Take a committed token. Return the part of it that belongs to the content."""
        return token_id if self.gate is None else self.gate.push(token_id)

    def take(self, answer: wire.NextMask) -> None:
        self.num_asked -= 1
        if answer.error is not None and answer.mask is not None:
            self.refusal = answer.error
        elif answer.error is not None:
            self.error = answer.error
        elif answer.mask is None:
            self.has_ended = True
        else:
            masks = answer.mask, *answer.after_drafts
            self.masks = [np.frombuffer(mask, dtype=np.uint8) for mask in masks]
