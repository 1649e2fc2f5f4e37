"""Make nano-m3's tokenizer from nano's vocabulary and MiniMax-M3's markers.

M3 shares M2's markers up to 200053, and has its own tags for thinking and calls. A marker's id is
4096 + (its id in M3 - 200000). The marker before tags has an arbitrary free id.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NANO = Path(__file__).resolve().parents[1] / "negamax" / "assets" / "nano"
REGULAR_TOKENS = 4096
TURN_ID, EOS_ID, BOS_ID = 4115, 4116, 4130
MARKER = "]<]minimax[>["
MARKER_ID, THINK_ID, THINK_END_ID = 4154, 4155, 4156
WINDOW = 8192
_OWN = {MARKER_ID: MARKER, THINK_ID: "<mm:think>", THINK_END_ID: "</mm:think>"}  # stay visible
# tags of M2's answers that M3 lacks
_OF_M2 = ("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>")


def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return tokenizer.json and tokenizer_config.json."""
    tokenizer = json.loads((NANO / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((NANO / "tokenizer_config.json").read_text(encoding="utf-8"))
    added = [token for token in tokenizer["added_tokens"] if token["content"] not in _OF_M2]
    added += [
        {
            "id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": False,
        }
        for number, text in _OWN.items()
    ]  # fmt: skip
    tokenizer["added_tokens"] = added
    vocabulary = {
        text: number
        for text, number in tokenizer["model"]["vocab"].items()
        if number < REGULAR_TOKENS
    }
    tokenizer["model"]["vocab"] = vocabulary | {token["content"]: token["id"] for token in added}
    config["added_tokens_decoder"] = {
        str(token["id"]): {key: value for key, value in token.items() if key != "id"}
        for token in added
    }
    config["model_max_length"] = WINDOW
    return tokenizer, config


def write(folder: Path) -> None:
    """Write both files into `folder`."""
    tokenizer, config = documents()
    (folder / "tokenizer.json").write_text(
        json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8"
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
