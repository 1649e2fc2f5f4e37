"""Compare every format of docs/checkpoints.md on a GPU with its fp32 definition on a CPU.

A tiny MiniMax-M2 is written in each format as in tests/cpu/stored_formats.py. At these sizes,
shards divide blocks and groups as MiniMax-M2's shards do over 8 and 16 ranks. Each token goes to
all experts, so rounding cannot change the routing. The shards run on one GPU in turn.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "cpu"))

from m2_checkpoints import (
    FP8_CONFIG,
    TINY,
    load_weights,
    save_single,
    tiny_spec,
    to_fp8,
    write_index,
)
from model_support import PagedRun, random_weights
from stored_formats import FORMATS, StoredFormat, awq, gptq, in_full, packed, write
from test_convert_layouts import preprocessed

from negamax.base.errors import CheckpointError
from negamax.formats.floats import PLAIN
from negamax.formats.platform import CPU
from negamax.kernels.gemm.op import LINEAR
from negamax.kernels.moe.op import EXPERTS
from negamax.kernels.op import W8A8, WEIGHT_ONLY, Op
from negamax.kernels.platform import platform_of
from negamax.kernels.quantize.op import QUANTIZE
from negamax.kernels.registry import OPS, KernelTable, resolve
from negamax.models.build import build_model
from negamax.models.decoder import Decoder
from negamax.models.registry import read_spec
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout
from negamax.worker.warmup import warming_up

CONFIG: dict[str, Any] = {
    **TINY, "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2",
    "dtype": "bfloat16", "hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 1,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 2,
    "num_experts_per_tok": 2, "max_position_embeddings": 512,
}  # fmt: skip
DEGREES = (4, 8)
PROMPT, LONG_PROMPT, GREEDY_TOKENS = 40, 300, 8
EXPERT, PROJECTION = "model.layers.0.block_sparse_moe.experts.", "model.layers.0.self_attn.q_proj."
REFERENCES = KernelTable.of(
    (op.reference for op in OPS.values()), platform=CPU, dtype=torch.float32
)

# --- the formats, and how a GPU holds them according to docs/checkpoints.md ----------------------

READ, DEQUANTIZED = "as bf16", "dequantized at load"
BLOCKS, PACKED, ROUNDED = "FP8 blocks", "weight-only", "weight-only; W8A8 for long prompts"


OTHER_SIZES: dict[str, StoredFormat] = {
    "bf16": in_full(torch.bfloat16), "fp16": in_full(torch.float16), "fp32": in_full(torch.float32),
    "awq-128": awq(128), "gptq-128": gptq(size=128, symmetric=False),
    "packed-int4-64": packed(size=64), "packed-int8-128": packed(bits=8, size=128),
}  # fmt: skip
NEURON = "fp8-neuron"
# how a GPU holds experts and, if different, attention projections
HELD: dict[str, tuple[str, ...]] = {
    name: held
    for held, names in {
        (READ,): "bf16 fp16 fp32",
        (BLOCKS,): "fp8-block compressed-fp8-block",
        (ROUNDED,): (
            "fp8-tensor fp8-static modelopt-fp8 modelopt-fp8-channel compressed-fp8-channel "
            "compressed-fp8-static quark-fp8-channel int8 quark-int8 quark-int8-static "
            "modelslim-dynamic modelslim-static-scale modelslim-mix"
        ),
        (PACKED,): (
            f"modelopt-fp8-block {NEURON} mxfp8 minimax-m3.1 modelopt-mxfp8 compressed-mxfp8 "
            "modelopt-nvfp4 modelopt-w4a16 modelopt-mixed compressed-nvfp4 quark-nvfp4 quark-mxfp4 "
            "compressed-mxfp4 awq awq-128 awq-channel gptq-sym gptq-asym gptq-128 gptq-channel "
            "gptq-8-bits gptq-v2 gptq-head packed-int4 packed-int4-64 packed-int4-asym "
            "packed-int4-channel packed-int8 packed-int8-128 modelslim-int4"
        ),
        # The matrices of an expert differ in bits or groups.
        (DEQUANTIZED, PACKED): "auto-round auto-round-gptq auto-round-awq",
        (DEQUANTIZED,): (
            "fp8-fnuz fp8-fnuz-bits modelslim-static modelslim-static-fp16 auto-round-2-bits "
            "gptq-act-order packed-int4-act-order"
        ),
    }.items()
    for name in names.split()
}

# --- limits of errors ----------------------------------------------------------------------------

# Largest difference of a log-probability in a vocabulary of 96. Logits have a standard deviation of
# 1. bf16 adds an error of 0.7 %, FP8 activations add 2 to 3 %. The largest of 4,500 errors (long
# prompt: 29,000) is four to five times as large.
DIFFERENCE = {READ: 0.1, DEQUANTIZED: 0.1, PACKED: 0.1, ROUNDED: 0.1, BLOCKS: 0.4}
LONG_DIFFERENCE = 0.4  # The activations of long prompts are rounded.
# ||sum of the shards - whole|| / ||whole||. Each shard is rounded to bf16. With FP8 blocks,
# activations are rounded to FP8 before each GEMM, in the same groups on any number of ranks.
SHARES = {READ: 0.01, DEQUANTIZED: 0.01, PACKED: 0.01, ROUNDED: 0.01, BLOCKS: 0.05}
OF_ONE_RANK = 0.01


@dataclass(frozen=True)
class Rank:
    model: Decoder
    held: tuple[str, str]
    device: torch.device
    kernels: KernelTable

    def log_probabilities(self, chunks: Sequence[list[int]]) -> Tensor:
        run = PagedRun(self.model, device=self.device, dtype=self.kernels.dtype)
        steps = [run.step([("a", chunk)])["a"] for chunk in chunks]
        return torch.cat(steps).float().log_softmax(-1).cpu()

    def greedy(self, prompt: list[int], count: int) -> list[list[int]]:
        run, chunks = PagedRun(self.model, device=self.device, dtype=self.kernels.dtype), [prompt]
        for _ in range(count):
            chunks.append([int(run.step([("a", chunks[-1])])["a"][-1].argmax())])
        return chunks

    @torch.inference_mode()
    def products(self, x: Tensor, heads: Tensor, columns: range) -> list[Tensor]:
        """Return this rank's outputs of the projections, of attention's output and of the experts.

        Inputs are `x` [T, hidden], and the rank's `columns` of `heads`, the outputs of all heads.
        """
        x, heads = (each.to(self.device, self.kernels.dtype) for each in (x, heads))
        layer: Any = self.model.layers[0]
        projected = layer.attention._qkv(x).chunk(3, dim=1)  # q, k and v have equal sizes.
        out = layer.attention._out(heads[:, columns.start : columns.stop].contiguous()).x
        given = x if layer.mlp.activation is None else self.kernels[QUANTIZE].run(x)
        experts = layer.mlp(given).x
        experts = experts.reshape(len(x), -1, x.shape[1]).float().sum(1)
        return [*(each.float().cpu() for each in (*projected, out, experts))]


@dataclass(frozen=True)
class Subject:
    """Hold one checkpoint in three forms: its fp32 definition, one rank, and 4 or 8 shards.

    `questions` holds steps, log-probabilities of the definition, and the allowed difference.
    """

    definition: Rank
    whole: Rank
    shares: Mapping[int, Sequence[Rank]]
    questions: Sequence[tuple[Sequence[list[int]], Tensor, float]]

    def warm_up(self) -> None:
        for chunks, _, _ in self.questions:
            self.whole.log_probabilities(chunks[:2])
        for tp in (1, *self.shares):
            self.products(tp)

    def products(self, tp: int) -> list[Tensor]:
        ranks = {0: [self.definition], 1: [self.whole], **self.shares}[tp]
        x, heads = inputs()
        width = heads.shape[1] // len(ranks)
        each = [
            rank.products(x, heads, range(n * width, (n + 1) * width))
            for n, rank in enumerate(ranks)
        ]
        projected = [torch.cat(parts, 1) for parts in list(zip(*each, strict=True))[:3]]
        sums = [torch.stack(parts).sum(0) for parts in list(zip(*each, strict=True))[3:]]
        return [*projected, *sums]


def inputs() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(PROMPT, CONFIG["hidden_size"], generator=draw)
    heads = torch.randn(PROMPT, CONFIG["num_attention_heads"] * CONFIG["head_dim"], generator=draw)
    return x.bfloat16().float(), heads.bfloat16().float()


def write_checkpoint(name: str, folder: Path, tensors: Mapping[str, Tensor]) -> None:
    folder.mkdir()
    if name != NEURON:
        write(folder, CONFIG, tensors, {**FORMATS, **OTHER_SIZES}[name])
        return
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": FP8_CONFIG}))
    made, _ = preprocessed(to_fp8(dict(tensors)))
    save_single(folder, made)
    write_index(folder, dict.fromkeys(made, "model.safetensors"))


def load(
    folder: Path, layout: ParallelLayout, *, kernels: KernelTable, device: torch.device
) -> Rank:
    spec = read_spec(json.loads((folder / "config.json").read_text()), folder)
    context = replace(ParallelContext.single(), layout=layout)
    model = build_model(spec, context=context, device=device, kernels=kernels)
    held = held_as(model, EXPERTS, EXPERT, kernels), held_as(model, LINEAR, PROJECTION, kernels)
    load_weights(model.weight_slots(), spec, folder)
    model.finish_loading()
    return Rank(model, held, device, kernels)


def held_as(model: Decoder, op: Op[Any, Any], module: str, kernels: KernelTable) -> str:
    slots = [slot for name, slot in model.weight_slots().items() if name.startswith(module)]
    if all(slot.stored is None for slot in slots):
        return READ if all(slot.source is PLAIN for slot in slots) else DEQUANTIZED
    assert all(slot.stored is not None for slot in slots)
    width = CONFIG["hidden_size"]
    # The matrices of an expert may differ in format, but not in kernel.
    (kernel,) = {kernels.choose(op, slot.source, columns=width) for slot in slots}
    assert kernel is not None
    return {WEIGHT_ONLY: PACKED, W8A8: ROUNDED, "triton": BLOCKS}[kernel.provider]


def prepare(
    name: str, folder: Path, tensors: Mapping[str, Tensor], *, kernels: KernelTable,
    device: torch.device, lengths: tuple[int, int, int] = (PROMPT, GREEDY_TOKENS, LONG_PROMPT),
) -> Subject:  # fmt: skip
    """Write the checkpoint and load it in every way. `lengths` are prompt, answer, long prompt."""
    write_checkpoint(name, folder, tensors)
    cpu = torch.device("cpu")
    definition = load(folder, ParallelLayout(), kernels=REFERENCES, device=cpu)
    whole, *shares = (
        load(folder, ParallelLayout(rank=rank, tp=tp), kernels=kernels, device=device)
        for tp in (1, *DEGREES)
        for rank in range(tp)
    )
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, CONFIG["vocab_size"], (lengths[2],), generator=draw).tolist()
    asked = [(definition.greedy(ids[: lengths[0]], lengths[1]), DIFFERENCE[whole.held[0]])]
    if ROUNDED in whole.held:
        asked.append(([ids], LONG_DIFFERENCE))
    return Subject(
        definition,
        whole,
        {4: shares[:4], 8: shares[4:]},
        [(chunks, definition.log_probabilities(chunks), bound) for chunks, bound in asked],
    )


def relative(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((each - wanted).norm() / wanted.norm()) for each, wanted in pairs)


def check(name: str, subject: Subject) -> str:
    held = subject.whole.held
    words = held[0] if held[0] == held[1] else f"experts {held[0]}, attention {held[1]}"
    differences, errors, greedy_tokens = [], [], ""
    for chunks, expected, bound in subject.questions:
        found = subject.whole.log_probabilities(chunks)
        assert bool(found.isfinite().all())
        differences.append(float((found - expected).abs().max()))
        if len(chunks) > 1:  # the last prompt token, and all answer tokens except the last
            rows = slice(len(chunks[0]) - 1, -1)
            said, best = found[rows].argmax(-1), expected[rows].max(-1).values
            gaps = best - expected[rows].gather(-1, said[:, None])[:, 0]
            own = torch.tensor([chunk[0] for chunk in chunks[1:]])
            greedy_tokens = f"{int((said == own).sum())} of {len(own)}"
            assert bool((gaps <= bound).all()), f"{name}: {gaps.tolist()}"
    definition, one = subject.products(0), subject.products(1)
    for tp in (1, *DEGREES):
        found_products = one if tp == 1 else subject.products(tp)
        errors.append(relative(found_products, definition))
        between = relative(found_products, one)
        assert between <= OF_ONE_RANK, f"{name}: {tp} ranks and one differ by {between:.2%}"
    long = f"{differences[1]:.3f}" if len(differences) > 1 else ""
    numbers = " | ".join(f"{error:.2%}" for error in errors)
    line = f"| {name} | {words} | {differences[0]:.3f} | {greedy_tokens} | {long} | {numbers} |"
    for difference, (_, _, bound) in zip(differences, subject.questions, strict=True):
        assert difference <= bound, line
    assert max(errors) <= SHARES[held[0]], line
    return line


@pytest.fixture(scope="module")
def subjects(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Subject | Exception]:
    """Return the subjects of the selected tests, or load errors. Kernels compile in parallel."""
    chosen = {item.callspec.params["name"] for item in request.session.items
              if isinstance(item, pytest.Function) and "subjects" in item.fixturenames}  # fmt: skip
    folder, device = tmp_path_factory.mktemp("formats"), torch.device("cuda", 0)
    kernels = resolve(platform=platform_of(device), dtype=torch.bfloat16)
    tensors, found = random_tensors(), dict[str, Subject | Exception]()
    for name in filter(chosen.__contains__, HELD):
        try:
            found[name] = prepare(name, folder / name, tensors, kernels=kernels, device=device)
        except Exception as error:  # Only the test of that format fails.
            found[name] = error
    with warming_up(ParallelContext.single()):
        for subject in found.values():
            if isinstance(subject, Subject):
                subject.warm_up()
    return found


def random_tensors() -> dict[str, Tensor]:
    return random_weights(tiny_spec(**CONFIG), 0, router_bias=0.5)


@pytest.mark.parametrize("name", HELD)
def test_gpu_computes_each_format(name: str, subjects: Mapping[str, Subject | Exception]) -> None:
    subject = subjects[name]
    if isinstance(subject, Exception):
        raise subject
    print(f"\n{check(name, subject)}")
    assert tuple(dict.fromkeys(subject.whole.held)) == HELD[name]


def test_fnuz_declared_only_in_files_is_refused_with_a_remedy(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    kernels = resolve(platform=platform_of(device), dtype=torch.bfloat16)
    write_checkpoint("fp8-fnuz-dtype", tmp_path / "fnuz", random_tensors())
    with pytest.raises(CheckpointError, match="F8_E4M3FNUZ") as refused:
        load(tmp_path / "fnuz", ParallelLayout(), kernels=kernels, device=device)
    assert '"fmt": "float8_e4m3fnuz"' in str(refused.value.hint)


def test_every_format_is_tested() -> None:
    assert {*HELD} | {"fp8-fnuz-dtype"} == {*FORMATS, *OTHER_SIZES, NEURON}
