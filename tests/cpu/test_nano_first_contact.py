"""What README, demo, chat page and guides show is answered well by the embedded model at its
default sampling.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from negamax import LLM

ROOT = Path(__file__).resolve().parents[2]
DRAWS = 1


@pytest.fixture(scope="module")
def contact() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "tools" / "nano"))
    try:
        import first_contact

        yield first_contact
    finally:
        sys.path.remove(str(ROOT / "tools" / "nano"))


def test_every_text_stands_in_the_files_that_show_it(contact: ModuleType) -> None:
    for shown in contact.CONVERSATIONS:
        for name in shown.files:
            page = (ROOT / name).read_text(encoding="utf-8")
            missing = [turn.text for turn in shown.turns if turn.text not in page]
            assert not missing, f"{name} does not show {missing}"


def test_what_is_shown_is_answered_in_whole_words_and_right(contact: ModuleType) -> None:
    with LLM("nano") as llm:
        scores = contact.play(llm, contact.CONVERSATIONS, DRAWS)
    faults = {
        shown.name: score.bad
        for shown, score in zip(contact.CONVERSATIONS, scores, strict=True)
        if score.bad
    }
    assert not faults


def test_broken_words_wrong_answers_and_missing_ends_are_seen(contact: ModuleType) -> None:
    from negamax.engine.llm import Completion
    from negamax.text.parser.events import ParsedOutput

    def fault(content: str, *, finish_reason: str = "stop") -> str | None:
        said = ParsedOutput(reasoning="apples now", content=content, tool_calls=[])
        completion = Completion(0, finish_reason=finish_reason, message=said)
        return contact.fault((), r"\w+ has 85 apples\.", "Tom has 47 apples", completion)

    assert fault("Tom has 85 apples.") is None
    assert "words" in str(fault("Hing has 85 apples."))
    assert "answer" in str(fault("Tom has 84 apples."))
    assert "no end" in str(fault("Tom has 85 apples.", finish_reason="length"))
