import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from grammar_support import reasoning, require_call, schema, tool
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from nano.suites import arithmetic, tool_calls
from negamax import LLM, SamplingParams
from negamax.base.errors import ConfigError
from negamax.bench.drafts import DraftCounts
from negamax.cli.main import main
from negamax.config.embedded import EMBEDDED, EMBEDDED_DRAFTS
from negamax.engine.core.setup import _make_worker_config
from negamax.engine.core.source import locate
from negamax.evals import accuracy
from negamax.evals.accuracy import SuiteResult, run_suite
from negamax.evals.suites import SUITES
from negamax.models.registry import read_spec
from negamax.options.engine import EngineOptions
from tests.tiny_draft import as_speculators

FOLDER = Path(__file__).resolve().parents[2] / "negamax" / "assets" / "nano"
SIZE_LIMIT = 24_000_000
QUESTION = (
    "There are 517 pens in the market. Lucia brings 43 more pens. How many pens are there now?"
)


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))


def test_config_is_of_minimax_m2_in_a_small_folder(config: dict[str, Any]) -> None:
    expected = {
        "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2",
        "attn_type_list": [1] * config["num_hidden_layers"], "scoring_func": "sigmoid",
        "use_routing_bias": True, "qk_norm_type": "per_layer", "eos_token_id": 4116,
        "bos_token_id": 4130,
    }  # fmt: skip
    assert {name: config[name] for name in expected} == expected
    quantization = config["quantization_config"]
    assert (quantization["quant_method"], quantization["weight_block_size"]) == ("fp8", [128, 128])
    generation = json.loads((FOLDER / "generation_config.json").read_text(encoding="utf-8"))
    expected = {"do_sample": True, "temperature": 0.3, "top_p": 0.95, "top_k": 40}
    expected["eos_token_id"] = 4116
    assert {name: generation[name] for name in expected} == expected
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= SIZE_LIMIT


def test_tensors_are_in_the_files_of_the_index(config: dict[str, Any]) -> None:
    """Check dtypes and files; the engine checks names and shapes when it loads the tensors."""
    index = json.loads((FOLDER / "model.safetensors.index.json").read_text(encoding="utf-8"))
    dtypes = Counter[str]()
    for file_name in set(index["weight_map"].values()):
        with safe_open(FOLDER / file_name, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                assert index["weight_map"].pop(name) == file_name
                dtypes[file.get_slice(name).get_dtype()] += 1
    assert not index["weight_map"]
    num_matrices = config["num_hidden_layers"] * (4 + 3 * config["num_local_experts"])
    assert dtypes["F8_E4M3"] == num_matrices
    # Scales, routers and their biases have this dtype.
    assert dtypes["F32"] == num_matrices + 2 * config["num_hidden_layers"]
    assert dtypes["BF16"] == 3 + 4 * config["num_hidden_layers"]


def test_special_tokens_have_their_ids_and_visibility() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    added = {
        token.content: (number, token.special)
        for number, token in tokenizer.get_added_tokens_decoder().items()
    }
    special = {"]~!b[": 4130, "[e~[": 4116, "]~b]": 4115}
    plain = {"<think>": 4146, "</think>": 4147}
    plain |= {"<minimax:tool_call>": 4148, "</minimax:tool_call>": 4149}
    assert all(added[text] == (number, True) for text, number in special.items())
    assert all(added[text] == (number, False) for text, number in plain.items())
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    regular = [number for number in vocabulary.values() if number < 4096]
    assert len(set(regular)) == 4096
    assert all(4096 <= number < 4160 for number, _ in added.values())


@pytest.mark.parametrize(
    "text",
    [
        "347 * 26",
        "São Paulo 東京 🙂",
        "def f(x):\n\treturn x  # ok\n",
        "<think>\nA</think>\n\n\n<minimax:tool_call>\n",
    ],
)
def test_any_text_survives_encoding(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    digits = [number for number in ids if tokenizer.decode([number]).strip().isdigit()]
    assert all(len(tokenizer.decode([number]).strip()) == 1 for number in digits)


def test_transformers_loads_it_and_it_answers_a_word_problem() -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    quantization = transformers.FineGrainedFP8Config(
        dequantize=True,
        weight_block_size=(128, 128),
        modules_to_not_convert=["gate", "e_score_correction_bias", "lm_head"],
    )
    model = transformers.MiniMaxM2ForCausalLM.from_pretrained(
        FOLDER, quantization_config=quantization
    ).float()
    asked = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=120, do_sample=False)
    output = output[0, prompt["input_ids"].shape[1] :]
    text = tokenizer.decode(output, skip_special_tokens=True)
    reasoning, _, answer = text.partition("</think>")
    assert "517 + 43" in reasoning and "= 560" in reasoning
    assert answer.strip() == "There are 560 pens now."


M3_FOLDER = EMBEDDED["nano-m3"]
M3_SIZE_LIMIT = 15_600_000
M3_TEXT_FILE = "model-00001-of-00001.safetensors"


def test_files_are_those_of_a_small_minimax_m3() -> None:
    assert sum(path.stat().st_size for path in M3_FOLDER.iterdir()) <= M3_SIZE_LIMIT
    config = json.loads((M3_FOLDER / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["MiniMaxM3SparseForConditionalGeneration"]
    assert config["model_type"] == "minimax_m3_vl"
    spec = read_spec(config)
    assert spec.num_layers == 5 and spec.max_position_embeddings == 8192 and spec.notes == ()
    caches = [[cache.name for cache in layer] for layer in spec.kv_caches()]
    assert caches == [["k", "v"]] * 2 + [["k", "v", "index"]] * 3
    files = (M3_TEXT_FILE, "vision.safetensors")
    tensors, tower = (load_file(M3_FOLDER / file) for file in files)
    index = json.loads((M3_FOLDER / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["weight_map"] == dict.fromkeys(tensors, files[0]) | dict.fromkeys(tower, files[1])
    total = sum(each.nbytes for each in (*tensors.values(), *tower.values()))
    assert index["metadata"]["total_size"] == total
    assert all(name.startswith("language_model.") for name in tensors)
    scaled = {name for name in tensors if f"{name}_scale_inv" in tensors}
    assert {tensors[name].dtype for name in scaled} == {torch.float8_e4m3fn}
    assert sum(tensors[name].numel() for name in scaled) > 7_000_000
    for name, model in (("minimax-m2", "nano"), ("minimax-m3-mxfp8", "nano-m3")):
        found = locate(EngineOptions(model=name, load_format="synthetic"))
        assert found.tokenizer_folder == EMBEDDED[model]


@pytest.fixture(scope="module")
def nano_m3() -> Iterator[LLM]:
    with LLM("nano-m3", num_threads=1) as llm:
        yield llm


def solved(llm: LLM, suite: str, count: int) -> int:
    return run_suite(llm, suite, count=count, seed=3).correct


def test_it_solves_what_it_was_trained_for(nano_m3: LLM) -> None:
    assert solved(nano_m3, "nano-math", 2) + solved(nano_m3, "nano-tools", 4) >= 5


def test_it_sees_digits_numbers_words_colors_and_shapes(nano_m3: LLM) -> None:
    result = run_suite(nano_m3, "nano-vision", count=10)
    kinds = [result.solved[first::5] for first in range(5)]
    assert all(kind == "11" for kind in (kinds[0], *kinds[2:])), kinds
    assert kinds[1].count("1") >= 1, kinds


@pytest.mark.full
def test_random_blocks_do_not_replace_selected_ones(
    nano_m3: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accuracy, "MOST_TOKENS", 200)
    assert solved(nano_m3, "nano-retrieval-2k", 3) == 3
    folder = Path(shutil.copytree(M3_FOLDER, tmp_path / "random"))
    file = folder / M3_TEXT_FILE
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(0)
    for name, weight in tensors.items():
        if name.endswith(("index_q_proj.weight", "index_k_proj.weight")):
            order = torch.randperm(weight.numel(), generator=generator)
            shuffled = weight.view(torch.uint8).flatten()[order].view_as(weight)
            tensors[name] = shuffled.view(weight.dtype)
    save_file(tensors, file)
    with LLM(str(folder), num_threads=1) as llm:
        assert solved(llm, "nano-retrieval-2k", 3) <= 1


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


WEATHER = tool("get_weather", city={"type": "string", "maxLength": 12})
MOOD = tool("", mood={"enum": ["good", "bad"]}, age={"type": "integer", "maximum": 99})
MOOD_SCHEMA = {**MOOD["function"]["parameters"], "additionalProperties": False}


def requests(llm: LLM) -> tuple[list[Any], list[SamplingParams]]:
    asked = llm.render([{"role": "user", "content": "What is 417 + 386?"}])
    rome = [{"role": "user", "content": "What's the weather in Rome?"}]
    tools, person, thinks = require_call([WEATHER]), schema(MOOD_SCHEMA), reasoning()
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
    prompts = [*[asked] * 7, llm.render(rome, tools=[WEATHER]), asked]
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
