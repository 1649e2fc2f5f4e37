"""Combine the fields by which clients control thinking into one `ThinkingChoice`.

The template of the M3 family writes one of three thinking modes into the prompt. M2 models always
think. For M2, "disabled" closes the think block in the prompt, and other modes do nothing.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from negamax.api.schemas.request_model import describe, refuse
from negamax.text.chat_template import ChatTemplate

MODES = ("enabled", "disabled", "adaptive")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_TEMPLATE_SWITCHES = ("thinking_mode", "enable_thinking", "thinking")  # keys that switch thinking


class ReasoningPlace(enum.Enum):
    FIELD = "a separate field"
    BLOCK = "a separate block, or the content if the server does not parse reasoning"
    CONTENT = "the content, between think tags"
    NOWHERE = "left out"


@dataclass(frozen=True, slots=True)
class ThinkingChoice:
    """A request's thinking settings. A field that is None selects the model's default."""

    mode: str | None = None  # One of MODES.
    effort: str | None = None  # One of EFFORTS.
    budget: int | None = None  # in tokens

    def mode_for(self, template: ChatTemplate) -> str | None:
        """Return the mode. Effort "minimal" disables thinking if `template` has thinking modes."""
        if self.mode is not None:
            return self.mode
        if self.effort == "none" or self.budget == 0:
            return "disabled"
        return "disabled" if self.effort == "minimal" and template.reads("thinking_mode") else None

    def template_variables(self, template: ChatTemplate) -> dict[str, Any]:
        """Return thinking variables for `template`. Omit the effort if thinking is disabled."""
        mode = self.mode_for(template)
        variables = {
            "thinking_mode": mode,
            "enable_thinking": None if mode is None else mode != "disabled",
            "reasoning_effort": None if mode == "disabled" else self.effort,
        }
        return {
            name: value
            for name, value in variables.items()
            if value is not None and template.reads(name)
        }


NO_CHOICE = ThinkingChoice()


def read_switch(is_on: bool | None) -> str | None:
    return None if is_on is None else "enabled" if is_on else "disabled"


def read_template_switch(kwargs: Mapping[str, Any]) -> str | None:
    """Return the thinking mode that a key of `chat_template_kwargs` sets, or None."""
    for name in _TEMPLATE_SWITCHES:
        value = kwargs.get(name)
        if value is None:
            continue
        if isinstance(value, bool):
            return read_switch(value)
        if value not in MODES:
            allowed = f"{', '.join(MODES)}, true, false"
            refuse("chat_template_kwargs", f"{name} is {describe(value)}; allowed: {allowed}")
        return str(value)
    return None


def drop_switches(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in _TEMPLATE_SWITCHES}
