"""Draft tokens equal those of plain PyTorch on transformers' hidden states, for any chunking."""

import json
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import graph_support
import pytest
import torch

from negamax import LLM, SamplingParams
from negamax.base import env
from negamax.base.errors import CheckpointError, ResourceError
from negamax.config.grammar import Grammar
from negamax.engine.core import source
from negamax.models.memory import draft_bytes, weight_bytes
from negamax.models.registry import find_draft_family
from negamax.scheduler.draft_length import FixedDraftLength
from negamax.worker import kv_cache
from negamax.worker.block_drafts import BlockProposer
from negamax.worker.step import StepRunner
from tests import tiny, tiny_block_draft, tiny_draft, tiny_m3
from tests.layouts import full
from tests.loop_driver import free_all, generate_tokens
from tests.tiny_block_draft import VARIANTS as BLOCK_VARIANTS
from tests.tiny_draft import VARIANTS, Proposal

SIZES = tiny.small_sizes(num_hidden_layers=5, max_position_embeddings=64)
IDS = [1, 2, 3]  # layer numbers counted by layer outputs, as trainers count them
LAYERS = (2, 3, 4)
NUM_DRAFT_TOKENS = 3
PROMPTS = [
    torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (3, 17, 21, 30)
]
PARAMS = [
    SamplingParams(temperature=temperature, seed=seed, max_tokens=20, ignore_eos=True)
    for seed, temperature in enumerate((0.0, 1.0, 0.0, 1.0))
]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 13, "max_num_seqs": 3},
    "preempted": {"num_kv_blocks": 30},
    "rests in between": {},
}


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.make_model(5, **SIZES)


@pytest.fixture(scope="module")
def folder(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(target, tmp_path_factory.mktemp("model"))


def engine(
    folder: Path, draft: str | None, more: dict[str, Any] | None = None, **options: Any
) -> LLM:
    if draft is not None:
        options["speculative_config"] = {
            "model": draft, "num_speculative_tokens": NUM_DRAFT_TOKENS,
            "adaptive": False, **(more or {}),
        }  # fmt: skip
    fixed: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1}
    return LLM(str(folder), **fixed | {"block_size": 4} | options)


def outputs(llm: LLM) -> list[list[int]]:
    return generate_tokens(llm, PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    with engine(folder, None) as llm:
        return outputs(llm)


Draft = tuple[dict[str, Any], tiny_draft.Weights, str]  # config, tensors and folder of a draft


@pytest.fixture
def draft(request: pytest.FixtureRequest, tmp_path: Path) -> Draft:
    """Write the draft of the variant that the test's parameter names (default: plain)."""
    return make_draft(getattr(request, "param", "plain"), tmp_path)


def make_draft(variant: str, folder: Path) -> Draft:
    return tiny_draft.make(variant, folder / "draft", vocab_size=96, hidden_size=32, ids=IDS)


def check_proposals(
    seen: list[Proposal], target: Any, outputs: list[list[int]], draft: Draft
) -> int:
    texts = [prompt + output for prompt, output in zip(PROMPTS, outputs, strict=True)]
    found, compared = tiny_draft.count_differing(seen, target, texts, LAYERS, *draft[:2])
    assert compared > 100
    return found


CASES = [("32-bit offsets", "plain"), ("speculators", "plain"), ("biases, two layers", "chunks")]
CASES += [("plain", "preempted"), ("plain", "rests in between")]
CASES += [("dspark", "chunks"), ("dspark, causal", "preempted"), ("dflash", "rests in between")]
CASES += [("dspark, mxfp8", "plain")]
REST = [(variant, "plain") for variant in (*VARIANTS, *BLOCK_VARIANTS)] + [("plain", "chunks")]


class Resting(FixedDraftLength):
    """Draft in two of five steps. The caches must also hold the residual streams of other steps."""

    def __init__(self) -> None:
        super().__init__(NUM_DRAFT_TOKENS)
        self.turns = cycle([0, 0, 0, NUM_DRAFT_TOKENS, NUM_DRAFT_TOKENS])

    def choose(self, num_rows: int) -> int:
        return next(self.turns)


@pytest.mark.parametrize(
    ("draft", "options"),
    [*CASES, *(full(*case) for case in REST if case not in CASES)],
    indirect=["draft"],
)
def test_drafts_equal_plain_pytorch_and_change_no_answer(
    folder: Path,
    target: Any,
    expected: list[list[int]],
    draft: Draft,
    options: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = tiny_draft.watch(monkeypatch.setattr)
    with engine(folder, draft[2], **OPTIONS[options]) as llm:
        if options == "rests in between":
            (scheduler,) = llm._loop._scheduler.ranks
            scheduler._draft_length = Resting()
        assert outputs(llm) == expected
        assert outputs(llm) == expected  # The second run reads the prefix cache.
        free_all(llm)
        stats = llm.stats()
    assert stats.cached_prompt_tokens > 0
    assert options != "preempted" or stats.preemption_count > 0
    assert check_proposals(seen, target, expected, draft) == 0


@pytest.mark.parametrize(
    ("changes", "least", "most"),
    [
        # The ids count layer inputs, so that each stream is one layer too early.
        ({"eagle_aux_hidden_state_layer_ids": IDS}, 50, 1000),
        ({"draft_lm_head_quantization": "fp8"}, 0, 40),
    ],
    ids=["layers off by one", "head in fp8"],
)
def test_changed_drafts_differ_and_change_no_answer(
    folder: Path,
    target: Any,
    expected: list[list[int]],
    draft: Draft,
    changes: dict[str, Any],
    least: int,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = tiny_draft.watch(monkeypatch.setattr)
    with engine(folder, draft[2], changes) as llm:
        assert outputs(llm) == expected
        worker = llm._loop.executor._worker  # type: ignore[attr-defined]
        held = worker.runner.config.draft.spec.quantization
    if "draft_lm_head_quantization" in changes:  # A CPU dequantizes the head.
        assert held.fields == {"format": "fp8_per_channel", "only": "lm_head"}
    assert least < check_proposals(seen, target, expected, draft) < most


@pytest.mark.parametrize("draft", ["plain", "dspark", full("dflash")], indirect=True)
def test_accepted_drafts_leave_complete_caches(
    folder: Path,
    target: Any,
    expected: list[list[int]],
    draft: Draft,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = [prompt + output for prompt, output in zip(PROMPTS, expected, strict=True)]
    seen = tiny_draft.watch(monkeypatch.setattr, texts)
    with engine(folder, draft[2]) as llm:
        assert outputs(llm) == expected
        stats = llm.stats()
    assert stats.num_accepted_tokens > 20 and stats.num_draft_tokens > stats.num_accepted_tokens
    found, compared = tiny_draft.count_differing(seen, target, texts, LAYERS, *draft[:2])
    assert found == 0 and compared > 50


@pytest.mark.parametrize("is_captured", [False, True])
def test_block_drafts_keep_grammars_and_stop_strings(
    tmp_path: Path, is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"vocab_size": 4160, "hidden_size": 256}
    draft = tiny_draft.make("dspark", tmp_path / "draft", ids=[0, 1, 2], **sizes)[2]
    fields: list[dict[str, Any]] = [
        {"grammar": Grammar(kind="regex", text="[A-Z][a-z]{2,9}, [0-9]{2}")},
        {"grammar": Grammar(kind="regex", text="[a-z ]{15,20}"), "temperature": 0.0},
        {"stop": ["e"]},
        {"logprobs": 2, "frequency_penalty": 0.5, "n": 2},
    ]
    params = [SamplingParams(seed=seed, max_tokens=24, **one) for seed, one in enumerate(fields)]
    prompts = [[5, 6, 7 + seed] * 5 for seed in range(len(params))]
    if is_captured:
        pool = graph_support.capture(monkeypatch)

    def answers(draft: str | None) -> list[Any]:
        with engine(Path("nano"), draft, max_model_len=64) as llm:
            made = [one for each in llm.generate(prompts, params) for one in each.outputs]
            accepted.append(llm.stats().num_accepted_tokens)
            return [(one.token_ids, one.text) for one in made]

    accepted: list[int] = []
    expected = answers(None)
    told = [prompt + list(one[0]) for prompt, one in zip(prompts, expected, strict=False)]
    tiny_draft.watch(monkeypatch.setattr, told)
    assert answers(draft) == expected
    assert accepted[1] > 5
    assert not is_captured or pool.num_replays > 0


@pytest.mark.parametrize("draft", ["plain", "dspark", "dflash"], indirect=True)
def test_captured_steps_propose_the_same(
    folder: Path, target: Any, draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = graph_support.capture(monkeypatch)
    sizes = {"max_num_seqs": len(PROMPTS), "max_num_batched_tokens": sum(map(len, PROMPTS))}
    with engine(folder, None, **sizes) as llm:
        without = outputs(llm)
    seen = tiny_draft.watch(monkeypatch.setattr)
    with engine(folder, draft[2], **sizes) as llm:
        assert outputs(llm) == without
    assert check_proposals(seen, target, without, draft) == 0
    assert pool.num_replays > 0


@pytest.mark.parametrize(
    ("draft", "is_captured"),
    [("dspark", False), ("dspark", True), ("dspark, causal", False)],
    indirect=["draft"],
)
def test_confidences_equal_plain_pytorch(
    folder: Path, target: Any, draft: Draft, is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results hold the mean over rows of the products of confidences."""
    config, tensors, model = draft
    lengths, seen = cycle([1, 3, 0, 2]), list[Any]()
    steps: dict[int, list[Any]] = {}  # rows for which each step proposed
    results: dict[int, list[float]] = {}
    propose, run = BlockProposer.propose, StepRunner.run

    def record(self: Any, states: Any, rows: Any, requests: Any, num_tokens: int) -> torch.Tensor:
        drafts = propose(self, states, rows, requests, num_tokens)
        for row, slot in enumerate(rows.slots.tolist() if num_tokens else ()):
            known = requests.tokens[slot, : rows.lengths[row]].tolist()
            if slot != requests.padding_slot:
                seen.append((known, self.confidences[row].clone(), num_tokens))
        return drafts

    def record_step(self: Any, plan: Any, bitmask: Any) -> Any:
        seen.clear()
        output = run(self, plan, bitmask)
        steps[plan.step_id] = [(*one, plan.num_proposed) for one in seen]
        return output

    class Varying(FixedDraftLength):
        def choose(self, num_rows: int) -> int:
            return next(lengths)

        def record(self, plan: Any, result: Any, seconds: float) -> None:
            results[plan.step_id] = result.expected

    if is_captured:
        pool = graph_support.capture(monkeypatch)
    monkeypatch.setattr(BlockProposer, "propose", record)
    monkeypatch.setattr(StepRunner, "run", record_step)
    sizes = {"max_num_seqs": len(PROMPTS), "max_num_batched_tokens": sum(map(len, PROMPTS))}
    with engine(folder, None, **sizes) as llm:
        expected = outputs(llm)
    with engine(folder, model, **sizes) as llm:
        (scheduler,) = llm._loop._scheduler.ranks
        scheduler._draft_length = Varying(NUM_DRAFT_TOKENS)
        assert outputs(llm) == expected
    for step, shares in results.items():
        found = [one[: proposed + 1] for _, one, _, proposed in steps[step]]
        means = torch.stack(found).cumprod(1).mean(0).tolist() if found else []
        assert shares == pytest.approx(means, abs=1e-6)
    texts = [prompt + output for prompt, output in zip(PROMPTS, expected, strict=True)]
    weights = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    embedding, head = (weight.detach() for weight in weights)
    oracle = tiny_block_draft.Oracle(config, tensors, embedding=embedding, head=head)
    compared, values = 0, set()
    for known, found, count, _ in (one for of_step in steps.values() for one in of_step):
        text = next((text for text in texts if text[: len(known)] == known), None)
        if text is None:
            continue  # The request of this row has ended, but the row is still in flight.
        with torch.no_grad():
            streams = target(torch.tensor([text]), output_hidden_states=True).hidden_states
        read = [streams[layer][0][: len(known) - 1] for layer in LAYERS]
        oracle.propose(read, torch.tensor(known), count)
        most = min(count + 1, NUM_DRAFT_TOKENS)
        assert found[:most].tolist() == pytest.approx(oracle.confidences[:most], abs=2e-5)
        compared, values = compared + most, values | {round(float(found[0]), 2)}
    assert compared > 60 and len(values) > 10
    assert not is_captured or pool.num_replays > 0


@pytest.mark.parametrize("draft", ["plain", "dspark", full("dflash")], indirect=True)
def test_sampled_drafts_change_no_answer(
    folder: Path, expected: list[list[int]], draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for method in ("greedy", "probabilistic"):
        with monkeypatch.context() as patch:
            seen = tiny_draft.watch(patch.setattr)
            with engine(folder, draft[2], {"draft_sample_method": method}) as llm:
                assert outputs(llm) == expected
        found.append({tuple(known): drafts for known, drafts in seen})
    greedy = [tuple(PROMPTS[row] + expected[row][:5]) for row in (0, 2)]
    drawn = [tuple(PROMPTS[row] + expected[row][:n]) for row in (1, 3) for n in range(1, 17)]
    greedy, drawn = (
        [one for one in known if one in found[0].keys() & found[1]] for known in (greedy, drawn)
    )
    assert all(found[0][known] == found[1][known] for known in greedy)
    assert sum(found[0][known] != found[1][known] for known in drawn) > 8


@pytest.mark.parametrize(
    ("draft", "name"),
    [("plain", "bundled"), ("dspark", "bundled"), full("plain", "folder")],
    indirect=["draft"],
)
def test_a_draft_without_weights_is_synthetic(
    folder: Path, draft: Draft, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = draft[2]
    if name == "bundled":
        config = json.loads((Path(model) / "config.json").read_text())
        family = find_draft_family(config)
        assert family is not None
        spec = family.read_spec(config)
        monkeypatch.setattr(source, "find_bundled_draft", {"tiny-draft": spec}.get)
        model = "tiny-draft"
    with engine(folder, None, load_format="synthetic") as llm:
        without = outputs(llm)
    seen = tiny_draft.watch(monkeypatch.setattr)
    with engine(folder, model, load_format="synthetic") as llm:
        assert outputs(llm) == without
    proposed = {token for _, drafts in seen for token in drafts}
    assert len(proposed) > 10 and all(0 <= token < 96 for token in proposed)


Q_PROJ = "self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"midlayer.{Q_PROJ}"), f"missing from the checkpoint: layers.0.{Q_PROJ}"),
        (lambda t: t.pop("d2t"), "1 tensor is missing from the checkpoint: d2t"),
        (lambda t: t.pop("lm_head.weight"), "missing from the checkpoint: lm_head.weight"),
        (lambda t: t.update(extra=torch.ones(2)), "1 tensor is not part of this model: extra"),
        (lambda t: t.update({"fc.weight": torch.ones(32, 64)}), "fc.weight has shape [32, 64]"),
        (lambda t: t.update(d2t=t["d2t"].float()), "d2t has dtype F32; supported: I64, I32"),
        (lambda t: t.update(d2t=t["d2t"].int() + 60), "tensor d2t maps 40 draft tokens"),
        (lambda t: t.update(d2t=t["d2t"] + 60), "tensor d2t maps 40 draft tokens"),
        (lambda t: t["t2d"].logical_not_(), "tensor t2d marks 56 tokens, and tensor d2t"),
        (lambda t: t.update(t2d=t["t2d"][1:]), "t2d has shape [95]"),
        (lambda t: t["norm.weight"].fill_(torch.nan), "NaN or infinite: norm.weight"),
        (
            lambda t: t.update({"layers.1.x": torch.ones(2)}),
            "num_hidden_layers in config.json is 1",
        ),
    ],
)
def test_refuses_invalid_files_of_a_draft(
    folder: Path, draft: Draft, change: Callable[[tiny_draft.Weights], None], words: str
) -> None:
    config, tensors, path = draft
    change(tensors)
    tiny_draft.save(config, tensors, Path(path))
    with pytest.raises(CheckpointError) as caught:
        engine(folder, path)
    assert words in caught.value.message
    assert caught.value.message.startswith(f"draft {path}: ")


def test_the_memory_of_a_draft_is_counted_and_refused_with_numbers(
    folder: Path, draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tensors, path = draft
    widths = []
    for model in (None, path):
        with engine(folder, model) as llm:
            config = llm._loop.executor._worker.runner.config  # type: ignore[attr-defined]
        widths.append(sum(one.heads * one.width * 4 for each in config.kv_caches for one in each))
    assert widths[1] - widths[0] == 2 * 2 * 8 * 4
    of_draft = sum(one.nbytes for name, one in tensors.items() if name != "t2d")
    assert draft_bytes(config.draft.spec, dtype="float32") == of_draft
    monkeypatch.setattr(kv_cache, "GIB", 1)
    room = weight_bytes(config.spec, dtype="float32") + of_draft
    monkeypatch.setattr(env, "available_memory", lambda: room - 1)
    with pytest.raises(ResourceError, match=f"the draft model needs {of_draft}.0 GiB"):
        engine(folder, path)


@pytest.mark.parametrize("place", ["alone", "beside", "among"])
def test_draft_of_m3_reads(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A DSpark draft is in the folder of its model, or among the model's tensors."""
    sizes = tiny_m3.random_sizes(
        3, vocab_size=96, hidden_size=32, num_hidden_layers=5, index_block_size=16,
        mlp_layer_types=["dense", *["sparse"] * 4], index_topk_blocks=2, index_local_blocks=1,
        layer_types=["full_attention", *["minimax_m3_sparse"] * 4],
    )  # fmt: skip
    target = tiny_m3.make_model(3, **sizes)
    tiny.save(target, tmp_path / "model")
    variant = "full vocabulary, norms" if place == "alone" else "dspark"
    config, tensors, draft = make_draft(variant, tmp_path)
    fields: dict[str, Any] = {}
    if place != "alone":
        fields = {"method": "dspark", "model": None}
        tiny_block_draft.join(tmp_path / "model", Path(draft), is_among=place == "among")
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    prompts = [PROMPTS[1] * 4, PROMPTS[3]]

    def texts(draft: str | None) -> list[list[int]]:
        with engine(tmp_path / "model", draft, fields, block_size=16, max_model_len=128) as llm:
            outputs = generate_tokens(llm, prompts, params)
            return [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]

    expected = texts(None)
    seen = tiny_draft.watch(monkeypatch.setattr)
    assert texts(draft) == expected
    found = tiny_draft.count_differing(seen, target, expected, LAYERS, config, tensors)
    assert found[0] == 0 and found[1] > 100
