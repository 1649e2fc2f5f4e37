from pathlib import Path

from nano import first_contact
from negamax import LLM

ROOT = Path(__file__).resolve().parents[2]


def test_every_text_is_in_the_files_that_show_it() -> None:
    for shown in first_contact.CONVERSATIONS:
        for name in shown.files:
            page = (ROOT / name).read_text(encoding="utf-8")
            missing = [turn.text for turn in shown.turns if turn.text not in page]
            assert not missing, f"{name} does not show {missing}"


def test_shown_texts_get_the_expected_answers() -> None:
    with LLM("nano") as llm:
        scores = first_contact.play(llm, first_contact.CONVERSATIONS, 1)
    faults = {
        shown.name: score.bad
        for shown, score in zip(first_contact.CONVERSATIONS, scores, strict=True)
        if score.bad
    }
    assert not faults


def test_held_out_questions_expect_an_answer_or_calls_of_their_tools() -> None:
    conversations = first_contact.held_out()
    assert len({shown.name for shown in conversations}) == 96
    for shown in conversations:
        names = {tool["function"]["name"] for tool in shown.tools}
        for exchange in shown.exchanges:
            assert exchange.answer or exchange.calls
            assert {name for name, _ in exchange.calls} <= names


def test_invented_words_wrong_answers_and_missing_ends_are_faults() -> None:
    from negamax.engine.llm import Completion
    from negamax.text.parser.events import ParsedOutput

    def fault(content: str, *, finish_reason: str = "stop") -> str | None:
        said = ParsedOutput(reasoning="apples now", content=content, tool_calls=[])
        completion = Completion(0, finish_reason=finish_reason, message=said)
        return first_contact.fault((), r"\w+ has 85 apples\.", "Tom has 47 apples", completion)

    assert fault("Tom has 85 apples.") is None
    assert "words" in str(fault("Hing has 85 apples."))
    assert "answer" in str(fault("Tom has 84 apples."))
    assert "no end" in str(fault("Tom has 85 apples.", finish_reason="length"))
