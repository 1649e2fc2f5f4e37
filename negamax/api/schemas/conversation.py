"""What requests with a conversation share, beside the fields of every request."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator

from negamax.api.schemas.request_model import refuse, shown
from negamax.api.schemas.sampled_request import SampledRequest
from negamax.text.chat_template import RESERVED_KWARGS

MAX_MESSAGES = 16_384


def check_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Refuse no messages, and more of them than a conversation has."""
    if not messages:
        refuse("messages", "the list is empty; send at least one message")
    if len(messages) > MAX_MESSAGES:
        refuse("messages", f"{len(messages)} messages; allowed: at most {MAX_MESSAGES}")
    return messages


def check_template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Refuse template variables that are none, or that the request itself sets."""
    for name in kwargs:
        if name in RESERVED_KWARGS:
            refuse(
                "chat_template_kwargs", f"{name!r} is a field of the request itself; set it there"
            )
        if not name.isidentifier():
            refuse("chat_template_kwargs", f"{shown(name)} is not a variable name")
    return kwargs


class TurnRequest(SampledRequest):
    """One answer to a conversation. What its dialect does not know itself is an extension, named as
    in chat completions.
    """

    # variables of the chat template
    chat_template_kwargs: (
        Annotated[dict[str, Any], AfterValidator(check_template_kwargs)] | None
    ) = None
