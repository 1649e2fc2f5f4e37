"""How much the model is to think: one choice behind the many names that clients have for it.

Models differ in what can be chosen. The M3 family has three modes, which its template writes into
the prompt. The M2 family always thinks by itself; for it "disabled" closes the think block in the
prompt, and the other modes change nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from negamax.api.schemas.request_model import refuse, shown
from negamax.text.chat_template import ChatTemplate

MODES = ("enabled", "disabled", "adaptive")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

# names of the choice in chat_template_kwargs
_TEMPLATE_SWITCHES = ("thinking_mode", "enable_thinking", "thinking")


class ReasoningPlace(enum.Enum):
    """Where the reasoning of an answer goes."""

    FIELD = "a field of its own"
    BLOCK = "a block of its own, unless the server leaves it in the content as generated"
    CONTENT = "the content, between think tags"
    NOWHERE = "left out"


def check_effort(value: object, place: str) -> str:
    """The effort that stands at `place` of a request. Errors: `InvalidRequestError`."""
    if not isinstance(value, str) or value not in EFFORTS:
        refuse(place, f"{shown(value)}; allowed: {', '.join(map(repr, EFFORTS))}")
    return value


@dataclass(frozen=True, slots=True)
class ThinkingChoice:
    """What a request says about thinking; None: nothing, so the model's own way. `budget` is in
    tokens.
    """

    mode: str | None = None  # of MODES
    effort: str | None = None  # of EFFORTS
    budget: int | None = None

    def mode_for(self, template: ChatTemplate) -> str | None:
        """The mode that mode, effort and budget add up to. Minimal effort means none where the
        model can stop thinking.
        """
        if self.mode is not None:
            return self.mode
        if self.effort == "none" or self.budget == 0:
            return "disabled"
        return "disabled" if self.effort == "minimal" and template.reads("thinking_mode") else None

    def template_variables(self, template: ChatTemplate) -> dict[str, Any]:
        """The variables for `template`, of those that it reads."""
        mode = self.mode_for(template)
        variables = {
            "thinking_mode": mode,
            "enable_thinking": None if mode is None else mode != "disabled",
            "reasoning_effort": self.effort,
        }
        return {
            name: value
            for name, value in variables.items()
            if value is not None and template.reads(name)
        }


NO_CHOICE = ThinkingChoice()


def switch(is_on: bool | None) -> str | None:
    """The mode behind a plain switch."""
    return None if is_on is None else "enabled" if is_on else "disabled"


def template_switch(kwargs: Mapping[str, Any]) -> str | None:
    """The mode that `chat_template_kwargs` ask for by one of the names in use, or None."""
    for name in _TEMPLATE_SWITCHES:
        value = kwargs.get(name)
        if value is None:
            continue
        if isinstance(value, bool):
            return switch(value)
        if value not in MODES:
            refuse(
                "chat_template_kwargs",
                f"{name} is {shown(value)}; allowed: {', '.join(MODES)}, true, false",
            )
        return str(value)
    return None


def other_variables(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`chat_template_kwargs` without the names of the thinking switch."""
    return {name: value for name, value in kwargs.items() if name not in _TEMPLATE_SWITCHES}
