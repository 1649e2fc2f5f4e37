"""Compare captured steps of a GPU, run in the interpreter, with eager steps of the definitions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from graph_support import RepeatedSteps
from m2_checkpoints import from_fp8, to_fp8
from model_support import build, random_weights
from sampling_support import GREEDY
from test_triton_graphs import step_graphs
from test_triton_model import SPEC, errors, gpu_model, kernel_table, use_few_programs
from test_triton_model import SPEC as M2_FP8
from test_triton_model_m3 import TEXT
from torch import Tensor
from transformers import MiniMaxM3VLConfig
from triton_support import ThreadGroup, Threads, launches

from negamax.checkpoint.synthetic import fill_synthetic
from negamax.config.kv_cache import KvCacheSpecs, split_over_holders
from negamax.config.model_spec import ModelSpec
from negamax.config.quantization import QuantizationSpec
from negamax.formats.platform import CPU
from negamax.kernels.drafts.op import count_accepted
from negamax.kernels.kvcache.op import FP8
from negamax.kernels.registry import OPS, KernelTable, resolve
from negamax.layers.attention import KvCaches
from negamax.layers.linear import ColumnParallel, ProjectionPart, stack_rows
from negamax.layers.weights import LayerSetup
from negamax.models.decoder import Decoder
from negamax.models.drafts import DraftModel
from negamax.models.eagle3.config import read_spec as read_draft_spec
from negamax.models.registry import find_draft_family, read_spec
from negamax.options.speculation import SpeculationConfig
from negamax.parallel.collectives import SingleRank
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout
from negamax.quantization.detect import detect
from negamax.quantization.scheme import WeightFormat
from negamax.scheduler.step import NewRow, StepPlan
from negamax.worker import batch, kv_cache
from negamax.worker.batch import StepColumns
from negamax.worker.block_drafts import BlockProposer
from negamax.worker.config import WorkerConfig
from negamax.worker.eagle3 import Eagle3Proposer
from negamax.worker.proposer import DraftRows, Proposer, TokenStates
from negamax.worker.request_state import RequestState
from negamax.worker.step_shapes import DRAFTS, ROWS, TOKENS, StepShape
from tests import tiny_block_draft, tiny_draft
from tests.kernel_cases.attention import run_metadata

HERE = torch.device("cpu")
LENGTHS = (70, 5, 97, 33, 48, 20)  # number of known tokens of each row
NUM_DRAFTS = 2
BLOCK_SIZE, ROW_BLOCKS = 32, 4
NUM_BLOCKS = len(LENGTHS) * ROW_BLOCKS
# slots, tokens of each slot, and how many of these are drafts
Step = tuple[list[int], list[int], list[int]]
ONES: Step = ([3, 0, 5], [1, 1, 1], [0, 0, 0])
MANY: Step = ([4, 2, 0, 1, 3], [1, 3, 3, 2, 3], [0, 2, 2, 1, 2])
MIX: Step = ([2, 0, 3], [3, 1, 3], [2, 0, 0])
STEPS = (
    ONES, ([1], [3], [2]), ([4, 0], [3, 2], [2, 1]), ([5, 2, 0], [1, 3, 2], [0, 2, 1]),
    ([2, 4, 1, 0], [3, 2, 1, 3], [2, 1, 0, 2]), MANY, ([0, 1, 2, 3, 4, 5], [3] * 6, [2] * 6), MIX,
)  # fmt: skip


def shapes_of(steps: Sequence[Step]) -> dict[str, list[StepShape]]:
    sizes = {2 if len(step[0]) <= 2 else 6 for step in steps if max(step[2])}
    return {
        ROWS: [StepShape.of_decodes(4, 0)] if ONES in steps else [],
        DRAFTS: [StepShape.of_decodes(size, NUM_DRAFTS) for size in sorted(sizes)],
        TOKENS: [StepShape(8, 8, 8, is_sampled=False)] if MIX in steps else [],
    }


def m3(**fields: object) -> ModelSpec:
    config = MiniMaxM3VLConfig(text_config=TEXT | fields).to_dict()
    return read_spec({**config, "dtype": "bfloat16"})


M2 = replace(M2_FP8, quantization=None)
M3 = m3(num_attention_heads=4, num_key_value_heads=2, index_n_heads=2)
SPARSE = m3(
    num_attention_heads=4, num_hidden_layers=1, layer_types=["minimax_m3_sparse"],
    mlp_layer_types=["dense"],
)  # fmt: skip
SHARDED = replace(
    SPARSE, num_kv_heads=2, sparse=replace(SPARSE.sparse, index_heads=2)
).shard_index()
SPARSE_FP8 = replace(SPARSE, quantization=M2_FP8.quantization)


class Unchanging(Proposer):
    num_draft_tokens = NUM_DRAFTS

    def propose(
        self, states: TokenStates, rows: DraftRows, requests: RequestState, num_tokens: int
    ) -> Tensor:
        return requests.drafts[rows.slots, :num_tokens]


def rows(spec: ModelSpec) -> RequestState:
    draw = torch.Generator().manual_seed(1)
    requests = RequestState(
        len(LENGTHS), BLOCK_SIZE * ROW_BLOCKS, max_blocks=ROW_BLOCKS, eos_token_ids=(), device=HERE,
        num_draft_tokens=NUM_DRAFTS,
    )  # fmt: skip
    requests.set_padding_block(NUM_BLOCKS)
    blocks = torch.randperm(NUM_BLOCKS, generator=draw).view(-1, ROW_BLOCKS).tolist()
    for slot, length in enumerate(LENGTHS):
        known = torch.randint(0, spec.vocab_size, (length,), generator=draw).tolist()
        requests._assign(NewRow(slot, known, length - 1, length - 1, blocks[slot], GREEDY))
    # All tokens of a prompt's chunk are already known.
    for slot, length in enumerate(LENGTHS):
        requests.tokens[slot, length : length + NUM_DRAFTS].random_(
            0, spec.vocab_size, generator=draw
        )
    requests.drafts[: len(LENGTHS)].random_(0, spec.vocab_size, generator=draw)
    return requests


def whole_caches(caches: KvCacheSpecs, dtype: torch.dtype) -> list[KvCaches]:
    """Fill all blocks and heads with large keys and values, so that wrong reads show."""
    draw = torch.Generator().manual_seed(2)
    kv = kv_cache.allocate(
        caches, NUM_BLOCKS + 1, block_size=BLOCK_SIZE, dtype=dtype, ranks=1, device=HERE
    )
    for layer in kv:
        for name, cache in layer.items():
            drawn = torch.randn(cache.shape, generator=draw) * (3 if name == "v" else 1)
            cache.copy_(drawn.bfloat16())
    return kv


def own_caches(spec: ModelSpec, dtype: torch.dtype, layout: ParallelLayout) -> list[KvCaches]:
    whole, view, parts = whole_caches(spec.kv_caches(), dtype), layout.attention, []
    specs = split_over_holders(spec.kv_caches(), view.cache_size)
    for caches, layer in zip(specs, whole, strict=True):
        part = {}
        for cache in caches:
            stored = layer[cache.name].view(torch.uint8)
            if cache.is_sharded:
                stored = stored[view.rank :: view.size]
            elif not cache.replicated:
                stored = stored[:, view.kv_heads(stored.shape[1])]
                if cache.holders > 1:
                    own = stored[view.cache_rank :: view.cache_size]
                    stored = torch.cat([torch.full_like(own[:1], 60), own])
            part[cache.name] = stored.contiguous().view(layer[cache.name].dtype)
        parts.append(part)
    return parts


@dataclass(frozen=True)
class Case:
    """Describe a test case. `error` limits ||logits - expected|| / ||expected|| of a token."""

    spec: ModelSpec
    cache_dtype: torch.dtype = torch.bfloat16
    steps: Sequence[Step] = (MANY, MIX)
    layout: ParallelLayout = ParallelContext.single().layout
    error: float = 0.03
    others: float = 0.0  # share of tokens that may select another block with an equal score

    def weights(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        drawn = random_weights(self.spec, 3)
        if self.spec.quantization is None:
            return drawn, drawn
        stored = to_fp8(drawn)
        return stored, from_fp8(stored)


def plan_of(step: Step) -> StepPlan:
    slots, counts, num_drafts = step
    return StepPlan(0, [], [], [], slots, counts, num_drafts, [True] * len(slots))


def is_mix(step: Step) -> bool:
    """Return whether a row runs more than one generated token and its drafts."""
    return step[1] != [1 + num_drafts for num_drafts in step[2]]


def layout_of(step: Step, requests: RequestState) -> batch.BatchLayout:
    return batch.build_batch_layout(
        plan_of(step), requests, generated_apart=False, drafts_apart=not is_mix(step)
    )


def definitions() -> KernelTable:
    kernels = [op.reference for op in OPS.values()]
    return KernelTable.of(kernels, platform=CPU, dtype=torch.float32)


def eager(
    model: Decoder,
    requests: RequestState,
    kv: list[KvCaches],
    step: Step,
    *,
    capture: Sequence[int] = (),
) -> tuple[Tensor, TokenStates]:
    requests.place_drafts(plan_of(step))
    token_ids, metadata = batch.build(layout_of(step, requests), requests)
    hidden, residuals = model.forward(token_ids, metadata, kv, capture=capture)
    return model.local_logits(hidden), TokenStates(metadata, residuals)


@torch.inference_mode()
def expected(case: Case, weights: dict[str, Tensor]) -> list[Tensor]:
    model, requests = build(case.spec, weights, kernels=definitions()), rows(case.spec)
    dtype = torch.float32 if case.cache_dtype == torch.bfloat16 else case.cache_dtype
    kv, known, found = whole_caches(case.spec.kv_caches(), dtype), requests.tokens.clone(), []
    for step in case.steps:
        requests.tokens.copy_(known)
        found.append(eager(model, requests, kv, step)[0])
    return found


@torch.inference_mode()
def captured(case: Case, weights: dict[str, Tensor], context: ParallelContext) -> list[Tensor]:
    model = gpu_model(weights, spec=case.spec, context=context)
    # With plain caches the test also runs padding rows alone. Otherwise padding follows other rows.
    requests, pool = rows(case.spec), RepeatedSteps(runs_captured=case.steps is STEPS)
    kv, group = own_caches(case.spec, case.cache_dtype, context.layout), context.attention_group
    graphs = step_graphs(shapes_of(case.steps), model, kv, requests, pool, Unchanging(), group)
    for kind in [kind for kind, shapes in graphs.shapes.items() if shapes]:
        graphs.capture(kind, pool, lambda *_: None)
    began, known, found = requests.num_computed.clone(), requests.tokens.clone(), []
    for step in case.steps:
        requests.num_computed.copy_(began)
        requests.tokens.copy_(known)
        slots, counts, num_drafts = step
        if is_mix(step):
            requests.place_drafts(plan_of(step))
            columns = layout_of(step, requests).columns
            shape = graphs.find(sum(counts), len(slots))
        else:
            columns = StepColumns.of_decodes(slots, counts)
            shape = graphs.find_decodes(len(slots), max(num_drafts))
        assert shape is not None
        graphs.prepare(shape, columns)
        buffers = graphs.replay(shape)
        logits = model.local_logits(buffers.hidden) if is_mix(step) else buffers.logits
        found.append(logits[: sum(counts)].clone())
    return found


CHOICES: dict[str, Any] = {"error": 0.1, "others": 0.1}
CASES = {
    "m2, fp8": Case(M2_FP8, FP8, error=0.15, steps=(ONES, MANY, MIX)),
    "m2, sharded caches": Case(M2, layout=ParallelLayout(tp=2, dcp=2)),
    "m3, sharded index keys": Case(SHARDED, layout=ParallelLayout(tp=2), **CHOICES),
    "m3, fp8": Case(SPARSE_FP8, FP8, error=0.2, others=0.3),
    "m2": Case(M2, steps=STEPS),
    "m3": Case(M3, steps=STEPS, **CHOICES),
    "m3, sharded caches": Case(SPARSE, layout=ParallelLayout(tp=2, dcp=2), **CHOICES),
}
FULL = ("m2", "m3", "m3, sharded caches")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in FULL)) for name in CASES]
)
def test_captured_rows_are_those_of_definition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_programs(monkeypatch)
    case = CASES[name]
    stored, plain = case.weights()
    threads = Threads(case.layout.tp)

    def rank_code(rank: int) -> list[Tensor]:
        group = ThreadGroup(threads, rank, memory=None) if threads.world > 1 else SingleRank()
        layout = replace(case.layout, rank=rank)
        return captured(case, stored, ParallelContext(layout, *[group] * 3, cache_group=group))

    parts = threads.run(rank_code)
    found = [torch.cat(of_step, dim=1) for of_step in zip(*parts, strict=True)]
    for step, got, want in zip(case.steps, found, expected(case, plain), strict=True):
        of_tokens = sorted(errors(got, want))
        others = int(case.others * len(of_tokens))
        assert of_tokens[-1 - others] < case.error, (step, of_tokens)


def draft_of(target: Decoder, kernels: KernelTable) -> Eagle3Proposer:
    layers = tuple(range(target.spec.num_layers + 1))
    draft = DraftModel(replace(draft_spec(), aux_layers=layers), None)
    speculation = SpeculationConfig(method="eagle3", num_speculative_tokens=NUM_DRAFTS)
    config = replace(
        worker_config(draft), spec=target.spec, max_num_seqs=len(LENGTHS), speculation=speculation
    )
    proposer = Eagle3Proposer(config, draft, kernels=kernels)
    proposer.load(target, ParallelContext.single(), HERE)
    proposer.use_caches(whole_caches(draft.spec.kv_caches(), kernels.dtype))
    return proposer


@torch.inference_mode()
def test_draft_model_proposes_by_definition_after_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_programs(monkeypatch)
    weights, _ = Case(M3).weights()
    slots, counts, num_drafts = (torch.tensor(column) for column in MANY)
    firsts = counts.cumsum(0) - counts
    model, requests, table = build(M3, weights, kernels=definitions()), rows(M3), definitions()
    proposer, kv = draft_of(model, table), whole_caches(M3.kv_caches(), table.dtype)
    known, capture = requests.tokens.clone(), proposer.capture
    sampled = eager(model, requests, kv, MANY)[0].argmax(-1)
    requests.drafts[slots[1:3], 0] = sampled[firsts[1:3]]
    drafts = requests.drafts.clone()
    requests.tokens.copy_(known)
    logits, states = eager(model, requests, kv, MANY, capture=capture)
    sampled = logits.argmax(-1)
    accepted = count_accepted(sampled, drafts[slots], firsts, num_drafts)
    assert accepted.tolist() == [0, 1, 1, 0, 0]
    requests.tokens[states.slots, states.positions + 1] = sampled
    drafted = DraftRows(slots, requests.num_computed[slots] + accepted + 2, firsts + accepted)
    proposed = proposer.propose(states, drafted, requests, NUM_DRAFTS)

    model = gpu_model(weights, keep_quantized=False, spec=M3)
    requests, pool = rows(M3), RepeatedSteps(runs_captured=False)
    kv, proposer = whole_caches(M3.kv_caches(), torch.bfloat16), draft_of(model, kernel_table())
    graphs = step_graphs(shapes_of([MANY]), model, kv, requests, pool, proposer)
    graphs.capture(DRAFTS, pool, lambda *_: None)
    requests.drafts.copy_(drafts)
    shape = graphs.find_decodes(len(slots), NUM_DRAFTS)
    assert shape is not None
    graphs.prepare(shape, StepColumns.of_decodes(*MANY[:2]))
    assert torch.equal(graphs.replay(shape).num_accepted[: len(slots)], accepted)
    assert torch.equal(requests.drafts[slots], proposed)


NUM_PROPOSED = 3
DRAFT_LENGTHS, COUNTS = [20, 7], [4, 2]  # tokens of two requests, and how many of these run
PASS = [  # ops of a draft pass with one token per row
    "_locate", "_plan_decode", "_embed_norms", "_split_k", "_head_norm_rope_write", "_decode",
    "_split_k", "_add_rms", "_split_k", "_swiglu", "_split_k", "_add_rms", "_split_k",
    "_tile_argmax", "_row_argmax", "_record_drafts",
]  # fmt: skip


def draft_spec(**fields: Any) -> Any:
    sizes = {"vocab_size": 64, "target_hidden_size": 128, "hidden_size": 128, "head_dim": 128}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    return read_draft_spec(tiny_draft.config(**sizes | ids | fields, torch_dtype="bfloat16"))


def block_spec(variant: str, **fields: Any) -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 128, "ids": [0, 1, 2]}
    own = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "rotary_dim": 64}
    own |= {"dspark_noise_token_id": 63}
    config = tiny_block_draft.config(variant, **sizes) | own | {"torch_dtype": "bfloat16"} | fields
    if "dflash_config" in config:
        config["dflash_config"] |= {"mask_token_id": 63}
    family = find_draft_family(config)
    assert family is not None
    return family.read_spec(config)


def worker_config(draft: DraftModel) -> WorkerConfig:
    return WorkerConfig(
        spec=SPEC, eos_token_ids=(), folder=None, layout=ParallelLayout(), device="cpu",
        dtype="bfloat16", kv_cache_dtype="auto", max_model_len=64, max_num_seqs=2,
        max_num_batched_tokens=16, block_size=16, num_kv_blocks=8, kv_cache_memory=None,
        gpu_memory_utilization=0.9, cudagraph_size=2, num_threads=1, seed=0, show_progress=False,
        addresses=None, draft=draft,
        speculation=SpeculationConfig(method="eagle3", num_speculative_tokens=NUM_PROPOSED),
    )  # fmt: skip


class DraftRun:
    def __init__(self, kernels: KernelTable, **fields: Any) -> None:
        variant = fields.pop("variant", None)
        spec = block_spec(variant, **fields) if variant else draft_spec(**fields)
        draft = DraftModel(spec, None)
        config = worker_config(draft)
        proposer = BlockProposer if variant else Eagle3Proposer
        self.proposer = proposer(config, draft, kernels=kernels)
        target = gpu_model(random_weights(SPEC, 3), keep_quantized=False)
        self.proposer.load(target, ParallelContext.single(), HERE)
        self.proposer.use_caches(
            kv_cache.allocate(
                draft.spec.kv_caches(), 9, block_size=16, dtype=torch.bfloat16, ranks=1, device=HERE
            )
        )
        self.requests = RequestState(
            2, 64, max_blocks=4, eos_token_ids=(), device=HERE, num_draft_tokens=NUM_PROPOSED
        )
        generator = torch.Generator().manual_seed(1)
        self.requests.tokens.random_(0, 64, generator=generator)
        self.requests.block_tables.copy_(torch.arange(12).view(3, 4).clamp_max(8))
        self.residuals = torch.randn(3, 8, 128, generator=generator).bfloat16()

    def propose(self, num_tokens: int) -> Tensor:
        slots, ends = torch.tensor([0, 1]), torch.tensor([3, 5])
        tables = self.requests.block_tables
        metadata = run_metadata(tables, DRAFT_LENGTHS, COUNTS, max_run=NUM_PROPOSED + 1)
        metadata.positions.clamp_(min=0)
        states = TokenStates(metadata, list(self.residuals))
        lengths = torch.tensor(DRAFT_LENGTHS) + 1
        with torch.inference_mode():
            return self.proposer.propose(
                states, DraftRows(slots, lengths, ends), self.requests, num_tokens
            )


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"draft_vocab_size": 40}, marks=pytest.mark.full),
        {"draft_vocab_size": 48, "norm_output": True, "fc_norm": True},
        {"variant": "dspark", "sliding_window": 19},
        {"variant": "dflash"},
    ],
    ids=str,
)
def test_draft_is_same_on_gpu(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_programs(monkeypatch)
    expected = DraftRun(resolve(platform=CPU, dtype=torch.bfloat16), **fields)
    got = DraftRun(kernel_table(), **fields)
    for _ in range(2):
        assert torch.equal(got.propose(NUM_PROPOSED), expected.propose(NUM_PROPOSED))


def test_one_more_draft_token_takes_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_programs(monkeypatch)
    draft_run = DraftRun(kernel_table(), draft_vocab_size=40)
    draft_run.propose(1)  # This run allocates memory that later runs share.
    with launches(monkeypatch) as one:
        draft_run.propose(1)
    with launches(monkeypatch) as three:
        draft_run.propose(3)
    assert three == one + 2 * PASS


@pytest.mark.parametrize(
    "fields",
    [
        None,
        {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ],
    ids=str,
)
def test_stacked_rows_equal_those_of_their_layers(fields: dict[str, Any] | None) -> None:
    scheme = detect(QuantizationSpec(fields["quant_method"], fields)) if fields else None
    weights = WeightFormat(torch.bfloat16, HERE, scheme)
    setup = LayerSetup(ParallelContext.single(), weights, kernel_table())
    parts = []
    for layer in range(2):
        own = [ProjectionPart(f"{layer}.{name}.weight", 128, range(128)) for name in "qkv"]
        parts.append((ColumnParallel(own, 128, setup=setup), range(128, 384)))
        fill_synthetic({slot.name: slot for slot in parts[-1][0].slots}, draft_spec(), seed=layer)
    run = stack_rows(parts)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.inference_mode():
        for (layer, rows), found in zip(parts, run(x), strict=True):
            layer.finish_loading()
            assert torch.equal(found, layer(x)[:, rows.start :])
