import math
import mmap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from model_support import build, tiny_config
from stored_kernels import KEEPING
from transformers import MiniMaxM3VLConfig

from negamax.base.errors import ConfigError, ResourceError
from negamax.config.kv_cache import (
    KvCacheSpec,
    block_bytes,
    check_index_options,
    choose_block_size,
    slot_bytes,
)
from negamax.config.model_spec import ModelSpec
from negamax.config.quantization import QuantizationSpec
from negamax.layers.weights import WeightSlot
from negamax.models.family import INT8_CACHE
from negamax.models.memory import dequantized, expert_padding, read_bytes, weight_bytes
from negamax.models.registry import bundled_spec, import_names, read_spec
from negamax.options.speculation import SpeculationConfig
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout
from negamax.worker import device, kv_cache
from negamax.worker.config import WorkerConfig
from negamax.worker.request_state import RequestState
from tests import tiny_m3

GIB = 2**30


def test_weights_are_counted_as_stored_or_by_the_dtype_of_dequantized_ones() -> None:
    spec = bundled_spec("minimax-m2")
    assert 230.0e9 < weight_bytes(spec, dtype="bfloat16") < 230.3e9  # size of the published files
    plain = weight_bytes(spec, dtype="float32", kept=dequantized)
    assert plain == 4 * sum(weight.num_elements for weight in import_names(spec).weights(spec))


KV = KvCacheSpec("k", heads=2, width=8), KvCacheSpec("v", heads=2, width=8)
INDEX = KvCacheSpec("index", heads=1, width=5, dtype="float32", block_tokens=12, replicated=True)
LAYERS = [KV, (*KV, INDEX), (), KV]  # a dense, a sparse, an attention-free and a dense layer
HERE = torch.device("cpu")


def test_layers_get_the_caches_they_declare_from_one_allocation_per_kind() -> None:
    layers = kv_cache.allocate(LAYERS, 7, block_size=12, dtype=torch.bfloat16, ranks=2, device=HERE)
    assert [list(caches) for caches in layers] == [["k", "v"], ["k", "v", "index"], [], ["k", "v"]]
    k, index = layers[0]["k"], layers[1]["index"]
    assert (k.shape, k.dtype, k.is_contiguous()) == ((7, 1, 12, 8), torch.bfloat16, True)
    assert (index.shape, index.dtype) == ((7, 1, 12, 5), torch.float32)
    of_k = [caches["k"] for caches in layers if caches]
    assert len({cache.untyped_storage().data_ptr() for cache in of_k}) == 1
    first, second, third = (cache.data_ptr() for cache in of_k)
    assert second - first == third - second >= k.nbytes
    assert k.untyped_storage().data_ptr() != layers[0]["v"].untyped_storage().data_ptr()
    for number, caches in enumerate(layers):
        for cache in caches.values():
            assert not cache.any()
            cache.fill_(number + 1)
    for number, caches in enumerate(layers):  # No two caches share memory.
        assert all((cache == number + 1).all() for cache in caches.values())
    shared = kv_cache.allocate(
        LAYERS, 1, block_size=12, dtype=torch.float32, ranks=1, device=HERE, shared=True
    )
    assert len({caches["v"].data_ptr() for caches in shared if caches}) == 1


@pytest.mark.parametrize(("ranks", "heads"), [(1, 2), (2, 1), (4, 1)])
def test_bytes_of_a_block_are_those_of_its_tensors(ranks: int, heads: int) -> None:
    layers = kv_cache.allocate(
        LAYERS, 1, block_size=24, dtype=torch.bfloat16, ranks=ranks, device=HERE
    )
    allocated = sum(cache.nbytes for caches in layers for cache in caches.values())
    assert allocated == block_bytes(LAYERS, 24, dtype="bfloat16", ranks=ranks)
    assert allocated == 3 * 2 * (heads * 24 * 8 * 2) + 24 * 5 * 4
    assert layers[0]["k"].shape[1] == heads and layers[1]["index"].shape[1] == 1


def test_blocks_are_whole_and_fill_the_budget_up_to_the_need() -> None:
    assert choose_block_size(LAYERS, None, default=16) == 24
    assert choose_block_size(LAYERS, 36, default=16) == 36
    assert choose_block_size([KV], None, default=16) == 16
    with pytest.raises(ConfigError, match=r"--block-size is 16.* multiple of 12") as refusal:
        choose_block_size(LAYERS, 16, default=16)
    assert "--block-size 24" in str(refusal.value)
    sizes = {"block_bytes": 1000, "block_size": 16, "max_model_len": 160}
    assert kv_cache.choose_num_blocks(**sizes, max_num_seqs=4, budget=25_500) == 25
    assert kv_cache.choose_num_blocks(**sizes, max_num_seqs=2, budget=10**9) == 20


@pytest.mark.parametrize(
    ("budget", "remedy"),
    [(9 * GIB, "lower --max-model-len to 144"), (0, "more GPUs"), (-5 * GIB, "more GPUs")],
)
def test_refuses_a_context_that_does_not_fit(budget: int, remedy: str) -> None:
    with pytest.raises(ResourceError) as refusal:
        kv_cache.choose_num_blocks(
            block_bytes=GIB, block_size=16, max_model_len=160, max_num_seqs=4, budget=budget
        )
    available = f"{max(0, budget) / GIB:.2f} GiB are available"
    for words in ("160 tokens needs 10.00 GiB", available, remedy):
        assert words in str(refusal.value)


def make_requests(count: int, length: int, block_size: int) -> RequestState:
    max_blocks = -(-length // block_size)
    return RequestState(count, length, max_blocks=max_blocks, eos_token_ids=(), device=HERE)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_request_slots_take_the_bytes_of_their_tensors_when_used() -> None:
    state = make_requests(3, 1000, 16)
    held = state.tokens.nbytes + state.block_tables.nbytes
    assert 4 * slot_bytes(1000, 16, item=state.tokens.itemsize) == held
    before, requests = resident_bytes(), make_requests(256, 2**20, 128)
    requests.tokens[:, :1000] += 7
    assert requests.tokens[200, 990:1010].tolist() == [7] * 10 + [0] * 10
    assert requests.tokens.nbytes > 2 * GIB and resident_bytes() - before < GIB


def test_refuses_devices_and_dtypes_that_are_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.choose_device("auto") == "cpu" and device.num_gpus("cpu") is None
    with pytest.raises(ConfigError, match="no CUDA device"):
        device.choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device.choose_device("auto") == "cuda" and device.num_gpus("cuda") == 2
    spec = bundled_spec("minimax-m2")
    with pytest.raises(ConfigError, match="bfloat16 or float16"):
        device.choose_dtype("float32", spec=spec, device="cuda")
    with pytest.raises(ConfigError, match="fp8 needs a GPU"):
        device.kv_dtype("fp8", dtype=torch.bfloat16, device="cpu")
    assert device.kv_dtype("fp8", dtype=torch.bfloat16, device="cuda") == torch.float8_e4m3fn
    assert device.index_dtype("fp8", dtype=torch.bfloat16) == torch.float8_e4m3fn
    with pytest.raises(ConfigError, match=r"--index-cache-dtype is float16; .* bfloat16, fp8"):
        device.index_dtype("float16", dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="this model has no index keys"):
        check_index_options(spec.kv_caches(), dtype="fp8", sharding="auto")
    with pytest.raises(ConfigError, match=r"--index-cache-sharding is on; this model has no index"):
        check_index_options(spec.kv_caches(), dtype="auto", sharding="on")
    check_index_options(bundled_spec("minimax-m3").kv_caches(), dtype="fp8", sharding="on")
    kv_cache.check_scales([INT8_CACHE], dtype=torch.bfloat16)
    kv_cache.check_scales([], dtype=torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match=r"fp8, but .* an int8 KV cache.*auto"):
        kv_cache.check_scales([INT8_CACHE], dtype=torch.float8_e4m3fn)


def test_messages_state_the_bytes_of_a_token_of_m3() -> None:
    config = WorkerConfig(
        bundled_spec("minimax-m3"), (1,), None, ParallelLayout(tp=4), "cpu", "bfloat16", "auto",
        max_model_len=2**20, max_num_seqs=1, max_num_batched_tokens=16, block_size=128,
        num_kv_blocks=None, kv_cache_memory=40 * GIB, gpu_memory_utilization=0.9, cudagraph_size=0,
        num_threads=1, seed=0, show_progress=False, addresses=None,
    )  # fmt: skip
    said = kv_cache.describe(8192, config, dtype=torch.bfloat16)
    assert said == "KV cache 44.25 GiB per rank in bfloat16, 45,312 bytes per token"
    said = kv_cache.describe(64, config, dtype=torch.bfloat16)
    assert "0.35 GiB (of the 40.00 GiB allowed: --max-num-seqs 1 requests of 1048576" in said
    refusal = r"1048576 tokens needs 44\.25 GiB of KV cache; 40\.00 GiB .*--max-model-len to 947840"
    with pytest.raises(ResourceError, match=refusal):
        kv_cache.choose_blocks(config, dtype=torch.bfloat16, workspace=0, device=HERE)
    assert kv_cache.draft_buffers(config) == 0
    drafts = replace(config, speculation=SpeculationConfig("ngram", 3), cudagraph_size=256)
    logits = 256 * 3 * config.spec.vocab_size // 4 * 4
    assert kv_cache.draft_buffers(drafts) == logits
    read = SimpleNamespace(spec=SimpleNamespace(aux_layers=(1, 2, 4), most_tokens=None))
    streams = 3 * 16 * config.spec.hidden_size * 2
    assert kv_cache.draft_buffers(replace(drafts, draft=read)) == logits + streams


SIZES = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 64}
SPEC = read_spec(tiny_config(3, intermediate_size=40, **SIZES))


def m3(shared_width: int) -> ModelSpec:
    sizes = tiny_m3.random_sizes(
        4, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, index_n_heads=4,
        vocab_size=64, num_local_experts=8, intermediate_size=40, dense_intermediate_size=48,
        shared_intermediate_size=shared_width, mlp_layer_types=["dense", "sparse"],
        layer_types=["full_attention", "minimax_m3_sparse"],
    )  # fmt: skip
    return read_spec(MiniMaxM3VLConfig(text_config=sizes).to_dict())


def held_bytes(slots: dict[str, WeightSlot]) -> int:
    return sum(
        math.prod(map(len, slot.region)) * slot.dtype.itemsize
        for slot in slots.values()
        if slot.dtype is not None and not slot.optional
    )


AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 8, "sym": True}
FAMILIES = {"m2": SPEC, "m3": m3(40), "m3 beside": m3(80)}


@pytest.mark.parametrize("family", ["m2", "m3"])
def test_a_family_names_every_tensor_of_a_model_and_its_shape(family: str) -> None:
    spec = FAMILIES[family]
    said = {
        weight.name.replace("*", str(number)): weight.shape
        for weight in import_names(spec).weights(spec)
        for number in range(weight.count)
    }
    slots = build(spec, loaded=False).weight_slots()
    assert said == {name: slot.shape for name, slot in slots.items() if not slot.optional}
    weights = import_names(spec).weights(spec)
    assert sum(weight.num_elements for weight in weights) == sum(map(math.prod, said.values()))


SPLITS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)]
LAYOUTS = [
    *(ParallelLayout(tp=tp, ep=ep) for tp, ep in SPLITS),
    *(ParallelLayout(rank, tp=2, pp=2) for rank in (0, 3)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_those_of_slots(family: str, layout: ParallelLayout, dtype: torch.dtype) -> None:
    """On 4 ranks the 2 KV heads are copied. Experts take equal bytes sharded or whole."""
    spec = FAMILIES[family]
    context = replace(ParallelContext.single(), layout=layout)
    slots = build(spec, loaded=False, context=context, dtype=dtype).weight_slots()
    name = str(dtype).removeprefix("torch.")
    assert weight_bytes(spec, dtype=name, kept=dequantized, layout=layout) == held_bytes(slots)


@pytest.mark.parametrize("expert", [r"\d+", "[23]", "(2|3)", "3"])
@pytest.mark.parametrize("bits", [4, 8])
def test_experts_that_no_kernel_takes_together_count_as_held(bits: int, expert: str) -> None:
    name = rf".*layers\.0\.mlp\.experts\.{expert}\.down_proj"
    if expert == "3":
        name = "model.layers.0.mlp.experts.3.down_proj"
    described = AUTO_ROUND | {"extra_config": {name: {"bits": bits}}}
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "head_dim": 16}
    config = {**tiny_config(3, intermediate_size=48, **sizes), "quantization_config": described}
    spec = read_spec(config)
    slots = build(spec, loaded=False, kernels=KEEPING).weight_slots()
    is_kept = "model.layers.0.block_sparse_moe.experts.0.w1.qweight" in slots
    assert is_kept is (bits == 4)
    assert weight_bytes(spec, dtype="float32") == held_bytes(slots)
    assert (expert_padding(spec, layout=ParallelLayout(tp=12)) is None) is not is_kept


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_each_rank_counts_the_experts_that_it_has(rank: int) -> None:
    """Give rank 1 one of the three experts in 8 bits, and rank 3 the other two."""
    described = AUTO_ROUND | {"extra_config": {r".*\.experts\.[267]\.": {"bits": 8}}}
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 64}
    config = tiny_config(3, intermediate_size=48, hidden_size=64, head_dim=16, **sizes)
    spec = read_spec({**config, "quantization_config": described})
    layout = ParallelLayout(rank, tp=4, ep=4)
    context = replace(ParallelContext.single(), layout=layout)
    slots = build(spec, loaded=False, context=context, kernels=KEEPING).weight_slots()
    assert weight_bytes(spec, dtype="float32", layout=layout) == held_bytes(slots)


def test_many_tokens_read_all_weights_and_a_packed_head_counts_as_held() -> None:
    everything = weight_bytes(SPEC, dtype="bfloat16") - SPEC.vocab_size * SPEC.hidden_size * 2
    assert read_bytes(SPEC, 10**6, dtype="bfloat16", ranks=1) == pytest.approx(everything)
    assert read_bytes(SPEC, 1, dtype="bfloat16", ranks=1) < everything
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 8}
    packed, plain = (
        replace(SPEC, quantization=QuantizationSpec("gptq", {**gptq, "lm_head": lm_head}))
        for lm_head in (True, False)
    )
    assert weight_bytes(packed, dtype="bfloat16") == weight_bytes(plain, dtype="bfloat16")
    assert weight_bytes(plain, dtype="bfloat16") < weight_bytes(SPEC, dtype="bfloat16")
