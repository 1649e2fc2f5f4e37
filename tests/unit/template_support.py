"""Load chat templates, and the recorded renderings of MiniMax's own templates.

`tools/record_golden.py` records the renderings.
"""

import json
from pathlib import Path
from typing import Any

from negamax.config.embedded import EMBEDDED
from negamax.text.chat_template import ChatTemplate

TESTS = Path(__file__).parents[1]
M3_LAYOUT = TESTS / "minimax_m3_layout.jinja"


def m2_template() -> ChatTemplate:
    """Return the built-in model's template as M2's, with another default identity."""
    source = (EMBEDDED["nano"] / "chat_template.jinja").read_text(encoding="utf-8")
    return ChatTemplate(source, variables={"model_identity": "You are a helpful assistant."})


def m3_template() -> ChatTemplate:
    return ChatTemplate(M3_LAYOUT.read_text(encoding="utf-8"))


def recorded_renders(family: str) -> list[dict[str, Any]]:
    """Return conversations of `family` ("m2" or "m3") with their recorded renderings."""
    file = TESTS / "golden" / f"minimax_{family}_renders.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def check_render(template: ChatTemplate, case: dict[str, Any], messages: Any) -> None:
    options = {"tools": case["tools"], **case["kwargs"]}
    rendered = template.render(messages, add_generation_prompt=False, **options)
    assert rendered == case["expected"]
    assert template.render(messages, **options) == case["expected"] + case["opening"]
