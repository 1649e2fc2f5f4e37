"""Find kernels that an engine compiles while it serves, for a GPU that this machine lacks.

`python tests/cpu/late_kernels.py sm_90 CASE ...` prints one JSON object per case. Rank 0 of the
real engine runs alone on "meta" tensors. Each launch records the key of its specialization, and a
captured step counts as run. Every sampled token is 0.
"""

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

# This import must come first, since it turns the interpreter off.
from compile_kernels import META, PLATFORMS, Driver  # isort: skip

import torch
import triton
from graph_support import Clockless
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import compute_cache_key

from negamax import LLM, SamplingParams
from negamax.config.grammar import Grammar
from negamax.engine.core import executor, setup
from negamax.kernels import platform as platforms
from negamax.kernels.peers import PeerMemory, PeerRegion, ShardRegion
from negamax.kernels.sampling.op import CANDIDATES
from negamax.parallel import symmetric
from negamax.parallel.collectives import SingleRank
from negamax.parallel.context import ParallelContext
from negamax.scheduler import scheduler
from negamax.scheduler.draft_length import FixedDraftLength
from negamax.scheduler.request import ImageInput
from negamax.worker import draft_model, graphs, kv_cache, runner, sampler, step, verify
from negamax.worker import step_output as outputs
from negamax.worker.config import WorkerConfig

ATEN = torch.library.Library("aten", "IMPL")  # The library's settings hold for the whole process.


def eagle3_draft(model: str, layers: list[int], count: int = 3, **fields: Any) -> dict[str, Any]:
    own = {"model": model, "eagle_aux_hidden_state_layer_ids": layers}
    return {"method": "eagle3", "num_speculative_tokens": count, **own, **fields}


M2 = {"model": "minimax-m2", "num_hidden_layers": 3}
M3 = {"model": "minimax-m3", "num_hidden_layers": 4}
M2_DRAFT = eagle3_draft("minimax-m2.5-eagle3", [1, 2, 3])
M3_DRAFT = eagle3_draft("minimax-m3-eagle3", [1, 2, 4])
SMALL = {"max_num_batched_tokens": 1024, "max_num_seqs": 24}
CASES: dict[str, dict[str, Any]] = {
    "M2": {**M2, **SMALL, "max_cudagraph_capture_size": 8},
    "M2, drafts": {
        **M2, "tensor_parallel_size": 4, "kv_cache_dtype": "fp8", "speculative_config": M2_DRAFT,
    },
    "M2, eager": {**M2, "tensor_parallel_size": 2, "enforce_eager": True},
    "M2, n-grams": {
        **M2, "quantization": "int4", "max_model_len": 20_000,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    },
    "M2, short window": {**M2, "tensor_parallel_size": 8, "max_model_len": 3000},
    "M3": {**M3, "tensor_parallel_size": 8, "max_cudagraph_capture_size": 8},
    "M3, eager": {**M3, "tensor_parallel_size": 4, "enforce_eager": True},
    "M3, drafts": {
        **M3, **SMALL, "tensor_parallel_size": 2, "quantization": "fp8",
        "speculative_config": {**M3_DRAFT, "num_speculative_tokens": 2},
    },
    "M3, 4 bits, drafts": {
        **M3, "tensor_parallel_size": 2, "quantization": "int4", "speculative_config": M3_DRAFT,
    },
    "M3, FP8 cache, drafts that are drawn": {
        **M3, "tensor_parallel_size": 4, "quantization": "fp8", "kv_cache_dtype": "fp8",
        "index_cache_dtype": "fp8",
        "speculative_config": eagle3_draft(
            "minimax-m3-eagle3-gqa", [1, 2, 4], 2, adaptive=False,
            draft_sample_method="probabilistic", draft_lm_head_quantization="fp8",
        ),
    },
    "M3, sharded index": {
        **M3, "tensor_parallel_size": 8, "quantization": "int4", "index_cache_sharding": "on",
        "enable_expert_parallel": True, "max_model_len": 33_333, "speculative_config": M3_DRAFT,
    },
    "M3.1, block drafts": {
        "model": "minimax-m3.1-flash", "num_hidden_layers": 6, **SMALL, "tensor_parallel_size": 4,
        "speculative_config": {
            "model": "minimax-m3.1-dspark", "eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4, 6],
        },
    },
    "M3, shared cache": {
        **M3, "tensor_parallel_size": 8, "decode_context_parallel_size": 2, "quantization": "mxfp8",
        "speculative_config": M3_DRAFT,
    },
}  # fmt: skip


@dataclass
class Launches:
    """Record the specializations of kernels, and when each was launched first, by Triton's key."""

    when: str = ""
    compiled: set[tuple[str, str]] = field(default_factory=set)  # kernels compiled ahead
    forms: dict[tuple[str, str], tuple[str, dict[str, Any]]] = field(default_factory=dict)

    def note(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        _, keys, _, _, bind = kernel.device_caches[0]
        bound, forms, options = bind(*args, **options, debug=False, instrumentation_mode="")
        form = kernel.fn.__name__, compute_cache_key(keys, forms, options)
        if warmup:
            self.compiled.add(form)
        elif form not in self.forms:
            parts = {name: of[1] for name, of in zip(bound, forms, strict=True)}
            self.forms[form] = self.when, {**parts, "options": options}

    def late(self) -> list[str]:
        """Return the kernels that were compiled late, with their difference from earlier ones."""
        found = []
        early = [(name, parts) for (name, _), (when, parts) in self.forms.items() if not when]
        for form, (when, parts) in self.forms.items():
            name = form[0]
            if when and form not in self.compiled:
                others = [list(_differences(of, parts)) for known, of in early if known == name]
                found.append(f"{name}, {when}: {', '.join(min(others, key=len, default=['new']))}")
        return found

    def alone(self) -> list[str]:
        early = {form for form, (when, _) in self.forms.items() if not when}
        return sorted(name for name, _ in early - self.compiled)


def _differences(known: Mapping[str, Any], parts: Mapping[str, Any]) -> Iterator[str]:
    for name, value in parts.items():
        before = known[name]
        if before != value and hasattr(value, "_asdict") and type(before) is type(value):
            yield from _differences(before._asdict(), value._asdict())
        elif before != value:
            yield f"{name} was {before!r} and is {value!r}"


class Group:
    """Stand in for a group of `size` ranks of which only rank 0 exists."""

    rank = 0

    def __init__(self, config: WorkerConfig, num_draft_tokens: int) -> None:
        self.size = world = config.layout.world_size
        hidden, most = config.spec.hidden_size, config.max_num_batched_tokens
        samples = config.max_num_seqs * (1 + num_draft_tokens)

        def region(rows: int, words: int) -> PeerRegion:
            flags = torch.empty(rows, dtype=torch.int32, device=META)
            return PeerRegion(_int64(world + 1), flags, rows, words)

        shards, (_, words) = None, symmetric._shard_words(most, hidden, world)
        if words:
            shards = ShardRegion(
                _int64(world), _int64(world), _int64(words).view(torch.uint8),
                min(most, symmetric.SHARD_ROWS), hidden // 2, lambda: None,
            )  # fmt: skip
        reduced = region(min(symmetric.REDUCE_ROWS, max(most, samples)), -(-hidden // 2))
        leading = region(samples, 2 * CANDIDATES)
        self.peers = PeerMemory(0, world, reduced, region(most, 2), leading, shards=shards)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.contiguous()

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        return tensor[: len(tensor) // self.size].contiguous()

    def all_gather(self, tensor: Tensor, *, dim: int) -> Tensor:
        return torch.cat([tensor] * self.size, dim=dim)


def _int64(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.int64, device=META)


def open_context(config: WorkerConfig, _device: object, num_draft_tokens: int) -> ParallelContext:
    layout = config.layout
    if layout.world_size == 1:
        return ParallelContext.single()
    group, alone = Group(config, num_draft_tokens), SingleRank()
    sharing: Any = alone
    if layout.dcp > 1:
        sharing = SimpleNamespace(
            size=layout.dcp, rank=0, peers=None,
            all_gather=lambda tensor, *, dim: torch.cat([tensor] * layout.dcp, dim=dim),
        )  # fmt: skip
    return ParallelContext(
        layout, attention_group=group, expert_group=group if layout.experts.size > 1 else alone,
        world=group, cache_group=sharing,
    )  # fmt: skip


class HostTensor:
    """Stand in for a host copy of device values; all values are zero."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)

    def read(self) -> Tensor:
        return self._tensor


class Pool:
    def capture(self, step: Callable[[], None]) -> Any:
        step()
        return SimpleNamespace(replay=lambda: None)

    def num_bytes(self) -> int:
        return 0


class AnyDraftLength(FixedDraftLength):
    def __init__(self, num_tokens: int) -> None:
        self._most, self._rng = num_tokens, random.Random(3)

    def choose(self, num_rows: int) -> int:
        return self._rng.randint(0, self._most)


def fill(slots: Mapping[str, Any], *_args: Any, **_options: Any) -> None:
    for slot in slots.values():
        if not slot.optional:
            slot.target, slot.written = None, True


def load_model(model: Any, *_args: Any, **_options: Any) -> str:
    fill(model.weight_slots())
    model.finish_loading()
    return ""


def install(arch: str) -> None:
    """Make the engines of this process take the code path of a GPU without the GPU."""
    platform = PLATFORMS[arch]
    is_amd = platform.vendor == "amd"
    target = ("hip", arch) if is_amd else ("cuda", int(arch.removeprefix("sm_")))
    driver.set_active(Driver(GPUTarget(*target, platform.warp_size)))
    torch.version.hip = "7.0" if is_amd else None
    platforms.platform_of = runner.platform_of = lambda _device: platform  # type: ignore
    setup.find_device = lambda _name: ("cuda", 8)
    setup.MultiProcessExecutor = executor.InProcessExecutor  # type: ignore
    runner.take_device = lambda _config: META
    runner.runtime_of = lambda _device: Clockless(
        is_asynchronous=True, graph_pool=Pool, is_batch_invariant=False, samples_on_shards=True
    )
    runner.open_context = open_context
    runner.load_model, draft_model.fill_synthetic = load_model, fill
    kv_cache.check_weights_fit = kv_cache.check_rows_fit = lambda *_, **__: None
    for module in (outputs, sampler, step, verify):
        module.HostTensor = HostTensor  # type: ignore
    scheduler.FixedDraftLength = AnyDraftLength  # type: ignore
    for name in ("empty_cache", "max_memory_allocated", "memory_allocated", "synchronize"):
        setattr(torch.cuda, name, lambda *_: 0)
    torch.cuda.reset_peak_memory_stats = lambda *_: None
    # These functions read values, which meta tensors do not have.
    ATEN.impl("_local_scalar_dense", lambda _: 0, "Meta")
    for method, without in (
        ("clamp_", lambda tensor, *_: tensor),
        ("tolist", lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype).tolist()),
        ("unique", lambda tensor: tensor),
    ):
        setattr(Tensor, method, _unless_meta(getattr(Tensor, method), without))
    Tensor.pin_memory = lambda tensor: tensor  # type: ignore
    # The import takes 15 s, and its decorator has no effect here.
    compiler: Any = ModuleType("torch._dynamo")
    compiler.disable = lambda function, recursive=True, **_: function
    sys.modules["torch._dynamo"] = compiler


def _unless_meta(method: Callable[..., Any], without: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(tensor: Tensor, *args: Any, **options: Any) -> Any:
        if tensor.is_meta:
            return without(tensor, *args)
        return method(tensor, *args, **options)

    return chosen


def serve(llm: LLM, launches: Launches, *, most_tokens: int, longest: int) -> None:
    rng = random.Random(1)

    def run(when: str, lengths: list[int], **params: Any) -> None:
        launches.when = when
        greedy = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
        prompts = [[rng.randint(100, 9000) for _ in range(length)] for length in lengths]
        llm.generate(prompts, SamplingParams(**(greedy | params)))

    chunks = (most_tokens // 2 - 5, most_tokens, most_tokens + 77, 2 * most_tokens + 5)
    for length in (1, 7, 16, 100, 333, 1000, *chunks):
        if length + 40 < longest:
            run(f"a prompt of {length} tokens", [length])
    run("two prompts", [33, 300])
    run("many prompts", [20 + 3 * i for i in range(24)], max_tokens=12)
    run("few decodes", [5, 40, 9], max_tokens=12)
    prompt = [rng.randint(100, 9000) for _ in range(700)]
    for when in ("a prompt", "a cached prefix"):
        launches.when = when
        llm.generate([prompt, [*prompt, 7, 8, 9]], SamplingParams(max_tokens=3, ignore_eos=True))
    for params in (
        {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}, {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.1}, {"frequency_penalty": 0.5}, {"logprobs": 3},
        {"prompt_logprobs": 2}, {"logit_bias": {5: 1.0}}, {"min_tokens": 2},
        {"grammar": Grammar(kind="regex", text=r"[\s\S]{9}")},
    ):  # fmt: skip
        run(f"{params}", [50, 3, 7, 4], max_tokens=6, **params)  # type: ignore[arg-type]
    find = graphs.StepGraphs.find
    graphs.StepGraphs.find = lambda *_: None  # type: ignore[method-assign]  # steps with prompts run eagerly
    for number in range(12):
        most, count = rng.choice((3, 20, 300, 3000)), rng.choice((2, 5, 9, 40, 70))
        lengths = [rng.randint(1, min(most, longest - 60)) for _ in range(count)]
        run(f"mix {number}", lengths, max_tokens=rng.choice((3, 20)))
    graphs.StepGraphs.find = find  # type: ignore[method-assign]
    if (vision := llm.info.vision) is not None:
        launches.when, params = "an image", llm._admit([[5] * 12], SamplingParams(max_tokens=2))
        ids = [5, 5, *[vision.image_token_id] * 6, 5, 5]
        image = ImageInput(2, 6, (4, 6), bytes(32), bytes(24 * vision.patch_values // 2))
        assert list(llm._run([ids], params, images=[[image]]))


def watch(case: str) -> dict[str, Any]:
    launches = Launches()
    triton.JITFunction.run = lambda *args, **options: launches.note(*args, **options)
    options = {"max_model_len": 32_768, "max_num_seqs": 64, **CASES[case]}
    llm = LLM(
        load_format="synthetic", num_kv_blocks=4000, log_level="error", show_progress=False,
        num_threads=1, **options,
    )  # fmt: skip
    with llm:
        most = options.get("max_num_batched_tokens", 8192)
        launches.when = "first"
        serve(llm, launches, most_tokens=most, longest=options["max_model_len"])
    return {
        "case": case, "forms": len(launches.forms), "late": launches.late(),
        "alone": launches.alone(),
    }  # fmt: skip


def main() -> None:
    install(sys.argv[1])
    for case in sys.argv[2:] or CASES:
        print(json.dumps(watch(case)), flush=True)


if __name__ == "__main__":
    main()
