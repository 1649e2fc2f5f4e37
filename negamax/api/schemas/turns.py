"""What the dialects with one answer per request share, beside the fields of every request."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator

from negamax.api.schemas.chat import check_template_kwargs
from negamax.api.schemas.common import SampledRequest


class TurnRequest(SampledRequest):
    """One answer to a conversation. What its dialect does not know itself is an extension, named as
    in chat completions.
    """

    # variables of the chat template
    chat_template_kwargs: (
        Annotated[dict[str, Any], AfterValidator(check_template_kwargs)] | None
    ) = None
