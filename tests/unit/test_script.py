from pathlib import Path

import pytest

from negamax.base.errors import ConfigError
from negamax.config.embedded import EMBEDDED
from negamax.engine.core import setup
from negamax.engine.core.scripted_executor import ScriptedExecutor
from negamax.engine.core.setup import start_loop
from negamax.engine.grammar.manager import GrammarManager
from negamax.models.minimax_m2.chat import MINIMAX_M2
from negamax.options.engine import EngineOptions
from negamax.scheduler.request import SamplingParams
from negamax.scheduler.step import GrammarBitmask, NewRow, StepPlan
from negamax.text.chat_template import ChatTemplate
from negamax.text.script import ScriptedAnswers, find_new_messages, read_script
from negamax.text.tokenizer import Tokenizer
from tests.tables import read_table

TOKENIZER = Tokenizer.from_folder(EMBEDDED["nano"])
TEMPLATE = ChatTemplate.from_folder(EMBEDDED["nano"])
EOS = TOKENIZER.eos_token_id

SCRIPT = """
context_length = 30000
[[rule]]
role = "tool"
message = "sunny"
content = "It is sunny."
[[rule]]
message = "weather"
prompt = '"name": "get_weather"'
thinking = "I ask the tool."
call = [{ name = "get_weather", arguments = { city = "Oslo", days = 2 } }]
[[rule]]
content = "I know no other answer."
"""
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = (
    'I ask the tool.\n</think>\n\n\n<minimax:tool_call>\n<invoke name="get_weather">\n'
    '<parameter name="city">Oslo</parameter>\n<parameter name="days">2</parameter>\n'
    "</invoke>\n</minimax:tool_call>"
)
ASKED = [{"role": "user", "content": "How is the weather?"}]
MADE = [{"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}]
CALLED = [
    *ASKED,
    {"role": "assistant", "content": "", "tool_calls": MADE},
    {"role": "tool", "content": "sunny"},
    {"role": "user", "content": "<system-reminder>Be brief.</system-reminder>"},
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> ScriptedAnswers:
    file = tmp_path_factory.mktemp("script") / "script.toml"
    file.write_text(SCRIPT)
    assert TEMPLATE is not None and EOS is not None
    model = {"tokenizer": TOKENIZER, "template": TEMPLATE, "eos_token_id": EOS}
    return ScriptedAnswers(read_script(str(file)), output_format=MINIMAX_M2, **model)


def rendered(messages: list[dict], **options: object) -> str:
    assert TEMPLATE is not None
    return TEMPLATE.render(messages, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        (rendered(ASKED, tools=[TOOL]), CALL),
        (rendered(ASKED), "\n</think>\n\nI know no other answer."),
        (rendered(CALLED, tools=[TOOL]), "\n</think>\n\nIt is sunny."),
        (rendered(ASKED) + "\n</think>\n\n", "I know no other answer."),
        ("plain text", "I know no other answer."),
    ],
    ids=["call", "no such tool", "tool result", "thinking closed", "no turns"],
)
def test_first_matching_rule_answers(answers: ScriptedAnswers, prompt: str, answer: str) -> None:
    tokens = answers.answer(TOKENIZER.encode(prompt))
    assert tokens[-1] == EOS
    assert TOKENIZER.decode(tokens[:-1], skip_special_tokens=False) == answer


def test_rules_match_messages_since_the_last_answer() -> None:
    assert find_new_messages(rendered(ASKED), MINIMAX_M2) == ("user", "How is the weather?")
    role, text = find_new_messages(rendered(CALLED), MINIMAX_M2)
    assert role == "tool"
    assert "sunny" in text and "Be brief" in text and "weather" not in text


@pytest.mark.parametrize(("text", "message"), read_table("script.broken_scripts_are_refused"))
def test_broken_scripts_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "script.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_script(str(file))

    # The refusal of an unknown name lists the bundled scripts.
    with pytest.raises(ConfigError, match="bundled script: agents"):
        read_script("agent")
    assert read_script("agents").context_length > 100_000


def test_a_mask_that_allows_nothing_fails_its_row_alone() -> None:
    loop, info = start_loop(EngineOptions(model="nano", script="agents", device="cpu"))
    prompt = TOKENIZER.encode("Hello")
    rows = [
        NewRow(slot, prompt, len(prompt), 0, [slot], SamplingParams(logprobs=0)) for slot in (0, 1)
    ]
    plan = StepPlan(7, rows, [], [], [0, 1], [len(prompt)] * 2, [0, 0], [True, True], [0])
    step = loop.executor.launch([plan])
    loop.executor.send_bitmask(GrammarBitmask(7, [0], [0], [bytes(-(-info.vocab_size // 8))]))
    (result,) = step()
    assert list(result.errors) == [0] and len(result.token_ids) == 2
    loop.shutdown()


def test_a_start_that_fails_late_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(ScriptedExecutor, "shutdown", lambda _: ended.append("executor"))
    monkeypatch.setattr(GrammarManager, "shutdown", lambda _: ended.append("grammars"))

    def fail(*_: object, **__: object) -> None:
        raise ConfigError("no")

    monkeypatch.setattr(setup, "choose_chunk_length", fail)
    with pytest.raises(ConfigError, match="no"):
        start_loop(EngineOptions(model="nano", script="agents", device="cpu"))
    assert ended == ["executor", "grammars"]
