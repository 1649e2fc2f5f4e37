import json
from pathlib import Path
from typing import Any

import pytest
from grammar_support import schema

from negamax.base.errors import InvalidRequestError
from negamax.config.grammar import Grammar
from negamax.models.minimax_m2.chat import M2Calls
from negamax.models.minimax_m3.chat import M3Calls
from negamax.models.registry import CALL_STYLES
from negamax.text.grammar.matcher import GrammarMatcher
from negamax.text.grammar.structural_tag import structural_tag
from negamax.text.grammar.tool_calls import tool_grammar
from tests.cpu.test_grammar_matcher import COMPILER, EOS, m2_block, m2_call, m3, m3_call

FOLDER = Path(__file__).parent / "schema_suite"
# Grammars accept one spelling of equal values: integers without a fraction.
SPELLINGS = {"0.0", "1.0", "[0.0]", "[1.0]", "9007199254740992.0"}
ORDERS = {"allOf: allOf", "allOf: allOf with base schema", "const: const with object"}
REFUSED = 126  # groups of the suite with keywords that no grammar can enforce


def accepts(grammar: Grammar, texts: list[str]) -> list[str]:
    compiled = COMPILER.compile(structural_tag(grammar, None, CALL_STYLES))

    def is_accepted(text: str) -> bool:
        following = GrammarMatcher(compiled)
        return following.take(text.encode()) and following.take(EOS)

    return list(filter(is_accepted, texts))


def test_the_public_suite_is_enforced_or_refused_by_name() -> None:
    refused = 0
    for name, given, valid, invalid in json.loads((FOLDER / "suite.json").read_text()):
        texts = [
            [json.dumps(value, ensure_ascii=False) for value in part] for part in (valid, invalid)
        ]
        try:
            accepted = set(accepts(schema(given), [*texts[0], *texts[1]]))
        except InvalidRequestError as error:
            refused += 1
            assert "'" in error.message or "no output" in error.message, (name, error.message)
            continue
        assert accepted.isdisjoint(texts[1]), name
        rejected = set(texts[0]) - accepted - SPELLINGS
        assert not rejected or name in ORDERS, (name, rejected)
    assert refused <= REFUSED


CASES = json.loads((FOLDER / "cases.json").read_text())


@pytest.mark.parametrize(
    ("kind", "given", "good", "bad"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_schemas_of_bug_reports(kind: str, given: Any, good: list[str], bad: list[str]) -> None:
    if kind in ("json", "lenient"):
        grammar = schema(given, strict=kind == "json")
    else:
        style = M2Calls() if kind == "m2" else M3Calls()
        tool = {"name": "f", "parameters": given, "strict": True}
        made = tool_grammar([tool], style, choice="required")
        assert made is not None
        grammar = made

        def write(text: str) -> str:
            return m2_block(m2_call(text, name="f")) if kind == "m2" else m3_call("f", m3(text))

        good, bad = list(map(write, good)), list(map(write, bad))
    assert accepts(grammar, good) == good
    assert accepts(grammar, bad) == []
