import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nano.suites import arithmetic, tool_calls
from negamax import LLM, SamplingParams
from negamax.base.errors import ConfigError
from negamax.bench.drafts import DraftCounts
from negamax.cli.main import main
from negamax.config.embedded import EMBEDDED_DRAFTS
from negamax.config.grammar import Grammar, Marker, Reasoning
from negamax.engine.core.setup import _make_worker_config
from negamax.engine.core.source import locate
from negamax.evals.accuracy import SuiteResult, run_suite
from negamax.evals.suites import SUITES
from negamax.models.minimax_m2.chat import MINIMAX_M2, M2Calls
from negamax.options.engine import EngineOptions
from negamax.text.grammar.tool_calls import tool_grammar
from tests.tiny_draft import as_speculators

# Tokens per greedy step with three draft tokens, in bf16, over `chats`.
LENGTHS = {"nano": 3.37, "nano-m3": 3.41}
Answer = tuple[Any, ...]


def engine(
    model: str, *, drafts: bool, fields: dict[str, Any] | None = None, **options: Any
) -> LLM:
    if drafts:
        options["speculative_config"] = {
            "method": "eagle3", "model": f"{model}-draft", "adaptive": False, **(fields or {}),
        }  # fmt: skip
    return LLM(model, device="cpu", num_threads=1, **options)


def chats(llm: LLM) -> list[Any]:
    told = [llm.render(list(one.messages)) for one in arithmetic.problems(6, 5)]
    asked = tool_calls.problems(6, 5)
    return told + [llm.render(list(one.messages), tools=list(one.tools)) for one in asked]


def counts(llm: LLM) -> dict[str, Any]:
    return DraftCounts.of_stats(llm.stats(), None).summary()


@pytest.mark.parametrize("model", [pytest.param("nano", marks=pytest.mark.full), "nano-m3"])
def test_as_many_drafts_are_accepted_as_after_training(model: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=48)
    with engine(model, drafts=False) as llm:
        expected = [one.outputs[0].token_ids for one in llm.generate(chats(llm), params)]
    with engine(model, drafts=True) as llm:
        assert [one.outputs[0].token_ids for one in llm.generate(chats(llm), params)] == expected
        found = counts(llm)["spec_decode_acceptance_length"]
    assert found == pytest.approx(LENGTHS[model], abs=0.05)


def test_drafts_from_other_layers_are_rejected() -> None:
    fields = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}  # The ids count layer inputs.
    with engine("nano", drafts=True, fields=fields) as llm:
        llm.generate(chats(llm)[:4], SamplingParams(temperature=0.0, max_tokens=32))
        assert counts(llm)["spec_decode_acceptance_length"] < LENGTHS["nano"] - 1


def test_speculators_format_serves_nano_with_its_draft(tmp_path: Path) -> None:
    folder = EMBEDDED_DRAFTS["nano-draft"]
    config = json.loads((folder / "config.json").read_text())
    config = as_speculators(config, verifier="nano", speculative_tokens=2)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with LLM(str(tmp_path), device="cpu", num_threads=1) as llm:
        assert llm.info.served_model_name == llm.info.model == "nano"
        assert llm.info.speculation is not None
        assert llm.info.speculation.num_speculative_tokens == 2
        llm.generate(chats(llm)[:3], SamplingParams(temperature=0.0, max_tokens=32))
        assert counts(llm)["spec_decode_acceptance_length"] > 1.5


@pytest.mark.parametrize("model", LENGTHS)
def test_files_are_those_of_a_small_eagle3_draft(model: str) -> None:
    folder = EMBEDDED_DRAFTS[f"{model}-draft"]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 2_900_000
    tensors = load_file(folder / "model.safetensors")
    assert torch.equal(torch.arange(1024) + tensors["d2t"], tensors["t2d"].nonzero().flatten())
    speculation = {"method": "eagle3", "model": f"{model}-draft"}
    draft = locate(EngineOptions(model, speculative_config=speculation)).draft
    assert draft is not None
    assert draft.spec.aux_layers == (2, 3, 5) and draft.spec.draft_vocab_size == 1024
    assert draft.spec.notes == ()
    with pytest.raises(ConfigError, match="is a draft model: it proposes tokens for another model"):
        locate(EngineOptions(f"{model}-draft"))


def test_warns_of_the_draft_of_another_model(caplog: pytest.LogCaptureFixture) -> None:
    for model, draft, count in (
        ("nano", "nano", 0),
        ("nano-m3", "nano-m3", 0),
        ("nano", "nano-m3", 1),
    ):
        options = EngineOptions(model, device="cpu", speculative_config={"model": f"{draft}-draft"})
        _make_worker_config(options, locate(options), None)
        said = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert len(said) == count
    assert "of type minimax_m3_vl (target_model_type), and the target is minimax_m2" in said[0]


CITY = {"type": "string", "maxLength": 12}
PARAMETERS = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "The weather of a city"}
WEATHER = {"type": "function", "function": FUNCTION | {"parameters": PARAMETERS}}
PERSON = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["mood", "age"],
    "additionalProperties": False,
}


def requests(llm: LLM) -> tuple[list[Any], list[SamplingParams]]:
    tokenizer = llm.tokenizer
    asked = [{"role": "user", "content": "What is 417 + 386?"}]
    called = llm.render([{"role": "user", "content": "What's the weather in Rome?"}],
                        tools=[WEATHER])  # fmt: skip
    thinks = Reasoning(
        state="open",
        opener=Marker("<think>", tokenizer.token_id("<think>")),
        closer=Marker("</think>", tokenizer.token_id("</think>")),
        call_opener=Marker("<minimax:tool_call>", tokenizer.token_id("<minimax:tool_call>")),
        closing_ids=tuple(tokenizer.encode("\n</think>\n\n")),
        max_newlines=3,
    )
    tools = tool_grammar([WEATHER], M2Calls(MINIMAX_M2.tag_ids(tokenizer)), choice="required")
    person = Grammar(kind="json_schema", text=json.dumps(PERSON))
    fields: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.0, "stop": ("ones",)},
        {"temperature": 0.0, "max_tokens": 7},
        {"temperature": 1.0, "n": 3, "top_k": 40, "logprobs": 0},
        {"temperature": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"temperature": 1.0, "stop": ("5", "3"), "include_stop_str_in_output": True, "n": 2},
        {"temperature": 0.0, "thinking_token_budget": 6},
        {"temperature": 0.6, "grammar": tools, "reasoning": thinks},
        {"temperature": 1.0, "grammar": person, "reasoning": thinks, "thinking_token_budget": 5},
    ]
    prompts = [llm.render(asked)] * 6 + [llm.render(asked), called, llm.render(asked)]
    params = [SamplingParams(**{"seed": 3, "max_tokens": 40, **each}) for each in fields]
    return prompts, params


def answers(llm: LLM) -> list[Answer]:
    return [
        (one.text, one.token_ids, one.finish_reason, one.stop_reason, one.logprobs,
         generation.prompt_logprobs)
        for generation in llm.generate(*requests(llm))
        for one in generation.outputs
    ]  # fmt: skip


def test_all_request_fields_give_the_same_answers_with_drafts() -> None:
    with engine("nano", drafts=False, max_model_len=512) as llm:
        expected = answers(llm)
    assert {"stop", "length"} <= {end for _, _, end, _, _, _ in expected}
    options = {"max_model_len": 512, "block_size": 16, "num_kv_blocks": 36}
    with engine("nano", drafts=True, **options) as llm:
        assert answers(llm) == expected
        assert answers(llm) == expected  # The second run reads the prefix cache.
        stats = llm.stats()
    assert stats.preemption_count > 0 and stats.cached_prompt_tokens > 0
    assert stats.num_accepted_tokens > 300
    with engine("nano", drafts=True, fields={"draft_sample_method": "probabilistic"}) as llm:
        assert answers(llm) == expected
        assert llm.stats().num_accepted_tokens > 150


def test_suite_is_solved_with_drafts_from_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    speculation = '{"method":"eagle3","model":"nano-draft"}'
    options = ("--suite", "nano-math", "--count", "2", "--speculative-config", speculation)
    assert main(["bench", "accuracy", *options]) == 0
    printed = capsys.readouterr().out
    assert "nano-math: 2 of 2 exact" in printed
    assert re.search(r"[23]\.\d\d tokens per row with drafts", printed)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", LENGTHS)
@pytest.mark.parametrize("suite", ["nano-math", "nano-tools"])
def test_suites_give_the_same_tokens_with_drafts(model: str, suite: str) -> None:
    """Run the whole suite with nano, and a quarter of the suite with nano-m3."""
    count = SUITES[suite] // (1 if model == "nano" else 4)

    def solved(drafts: bool) -> tuple[SuiteResult, list[list[int]]]:
        with engine(model, drafts=drafts) as llm:
            generate, made = llm.generate, list[Any]()

            def keep(*args: Any) -> Any:
                found = generate(*args)
                made.extend(found)
                return found

            llm.generate = keep  # type: ignore[method-assign]
            result = run_suite(llm, suite, count=count)
            return result, [list(one.outputs[0].token_ids) for one in made]

    (plain, texts), (drafted, same) = solved(False), solved(True)
    assert same == texts
    assert (drafted.correct, drafted.failures) == (plain.correct, plain.failures)
