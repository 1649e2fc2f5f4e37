"""Replay captured decodes at full width in any order: equal steps must give equal bits.

State that kernels keep between launches must not affect later steps. No kernel in this test sums in
an order that depends on time.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from negamax.checkpoint.synthetic import fill_synthetic
from negamax.config.model_spec import ModelSpec
from negamax.kernels.platform import platform_of
from negamax.kernels.registry import KernelTable, resolve
from negamax.models.build import build_model
from negamax.models.decoder import Decoder
from negamax.models.registry import bundled_spec
from negamax.parallel.collectives import SingleRank
from negamax.parallel.context import ParallelContext
from negamax.quantization import online
from negamax.scheduler.request import SamplingParams
from negamax.scheduler.step import NewRow
from negamax.worker import kv_cache
from negamax.worker.batch import StepColumns
from negamax.worker.device import Runtime, runtime_of
from negamax.worker.graphs import StepGraphs
from negamax.worker.request_state import RequestState
from negamax.worker.step_shapes import DRAFTS, ROWS, TOKENS, StepShape

SIZES = (1, 2, 3, 4, 8, 16, 64)  # rows of a step
ROUNDS = 200  # Each round replays all sizes twice, in a new order.
BLOCK_SIZE = 128
# lengths that rows use in turn: in one tile, over many splits, and over more than 16 blocks
LENGTHS = (3000, 5, 130, 2049, 700, 64, 1)
SAMPLING = tuple(
    SamplingParams(
        temperature=temperature, top_k=top_k, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
        max_tokens=9, seed=0,
    )
    for temperature, top_k in ((0.0, 0), (1.0, 0), (1.0, 8))
)  # fmt: skip


def m2(quantization: str | None) -> ModelSpec:
    spec = replace(bundled_spec("minimax-m2"), num_layers=2)
    return replace(spec, quantization=online.spec(quantization)) if quantization else spec


def m3(quantization: str) -> ModelSpec:
    spec = bundled_spec("minimax-m3")
    layers = (False, True)
    return replace(
        spec, num_layers=2, moe_layers=layers, sparse=replace(spec.sparse, layers=layers),
        quantization=online.spec(quantization), vision=None,
    )  # fmt: skip


def synthetic(spec: ModelSpec, kernels: KernelTable, device: torch.device) -> Decoder:
    model = build_model(spec, context=ParallelContext.single(), device=device, kernels=kernels)
    fill_synthetic(model.weight_slots(), spec, 0, device=device)
    model.finish_loading()
    return model


class Replays:
    """Capture steps of a model's first rows, each from the same initial state."""

    def __init__(
        self,
        spec: ModelSpec,
        kernels: KernelTable,
        *,
        sizes: Sequence[int],
        lengths: Sequence[int],
        device: torch.device,
        runtime: Runtime,
    ) -> None:
        """Capture a step per size. Rows use `lengths` in turn as their number of known tokens."""
        num_rows, per_row = max(sizes), max(lengths) // BLOCK_SIZE + 1
        draw = torch.Generator().manual_seed(1)
        self.requests = RequestState(
            num_rows, per_row * BLOCK_SIZE, max_blocks=per_row, eos_token_ids=spec.eos_token_ids,
            device=device,
        )  # fmt: skip
        self.requests.set_padding_block(num_rows * per_row)
        blocks = torch.randperm(num_rows * per_row, generator=draw).view(num_rows, per_row)
        for slot in range(num_rows):
            size = (lengths[slot % len(lengths)],)
            known = torch.randint(0, spec.vocab_size, size, generator=draw).tolist()
            sampling = SAMPLING[slot % len(SAMPLING)]
            row = NewRow(slot, known, len(known), len(known) - 1, blocks[slot].tolist(), sampling)
            self.requests._assign(row)
        caches = kv_cache.allocate(
            spec.kv_caches(), num_rows * per_row + 1, block_size=BLOCK_SIZE, dtype=kernels.dtype,
            ranks=1, device=device,
        )  # fmt: skip
        keys = torch.Generator(device).manual_seed(2)
        for layer in caches:
            for cache in layer.values():
                cache.copy_(torch.randn(cache.shape, generator=keys, device=device))
        self.shapes = {size: StepShape.of_decodes(size, 0) for size in sizes}
        shapes = {ROWS: list(self.shapes.values()), DRAFTS: [], TOKENS: []}
        runner = SimpleNamespace(
            model=synthetic(spec, kernels, device), caches=caches, requests=self.requests,
            kernels=kernels, context=SimpleNamespace(attention_group=SingleRank()),
            runtime=runtime, proposer=None, encoder=None,
        )  # fmt: skip
        self.graphs = StepGraphs(shapes, runner)
        assert runtime.graph_pool is not None
        self.num_layers = spec.num_layers
        self.graphs.capture(ROWS, runtime.graph_pool(), lambda *_: None)
        self._began = self.requests.num_computed.clone()

    def replay(self, size: int) -> tuple[Tensor, Tensor]:
        """Return logits and tokens of the first `size` rows, valid until the next replay."""
        shape = self.shapes[size]
        self.requests.num_computed.copy_(self._began)
        self.graphs.prepare(shape, StepColumns.of_decodes(range(size), [1] * size))
        buffers = self.graphs.replay(shape)
        self.graphs.draw(shape)
        return buffers.logits[:size], buffers.token_ids[:size]


def differing(replays: Replays, *, rounds: int) -> dict[int, int]:
    order, draw = list(replays.shapes) * 2, Random(0)
    first = {}
    for size in replays.shapes:
        logits, tokens = replays.replay(size)
        first[size] = logits.clone(), tokens.clone()
        assert bool(torch.isfinite(logits).all()) and bool((tokens >= 0).all())
    wrong = {size: torch.zeros_like(tokens[0]) for size, (_, tokens) in first.items()}
    for number in range(rounds):
        draw.shuffle(order)
        for size in order:
            logits, tokens = replays.replay(size)
            is_other = (logits.view(torch.int32) != first[size][0].view(torch.int32)).any()
            wrong[size] += is_other | (tokens != first[size][1]).any()
        if number % 10 == 9:  # Eager kernels run between replays.
            replays.graphs.warmup(replays.num_layers)
    return {size: int(count) for size, count in wrong.items() if int(count)}


@pytest.mark.parametrize(
    "spec",
    [m2(None), m2("int4"), m3("fp8"), m3("int4")],
    ids=["m2-fp8", "m2-int4", "m3-fp8", "m3-int4"],
)
@torch.inference_mode()
def test_equal_steps_give_equal_bits_in_any_order(spec: ModelSpec) -> None:
    device = torch.device("cuda", 0)
    runtime = runtime_of(device)
    kernels = resolve(platform=platform_of(device), dtype=torch.bfloat16)
    with torch.cuda.stream(torch.cuda.Stream(device)):  # The default stream cannot be captured.
        replays = Replays(
            spec, kernels, sizes=SIZES, lengths=LENGTHS, device=device, runtime=runtime
        )
        found = differing(replays, rounds=ROUNDS)
        torch.cuda.synchronize()
    del replays
    runtime.release_memory()
    assert found == {}
