"""Compile the exchange kernels for an absent H200, at the sizes of MiniMax-M2 and M3.

`python tests/cpu/compile_exchanges.py WORLD ...` prints one JSON object per kernel, like
`compile_kernels.py`, whose ops have one rank.
"""

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

# This import must come first, since it turns the interpreter off.
from compile_kernels import META, PLATFORMS, Driver, without_memory  # isort: skip

import torch
import triton
from torch import Tensor
from torn_words import reads_torn_words
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from negamax.kernels import platform as platforms
from negamax.kernels.attention import op as attention
from negamax.kernels.attention.triton_qk_norm import qk_norm_rope_write
from negamax.kernels.block_sparse.triton_selection import SelectionConstants
from negamax.kernels.block_sparse.triton_shard import MergePlan, merge_shards
from negamax.kernels.cache_shards.op import PartialResults
from negamax.kernels.cache_shards.triton_merge import merge_partials
from negamax.kernels.collectives.triton import all_reduce_add_rms
from negamax.kernels.dispatch.op import ExpertRanges
from negamax.kernels.dispatch.triton import combine, dispatch
from negamax.kernels.kvcache.op import KvCache, TokenPlaces
from negamax.kernels.norm.triton import prepare
from negamax.kernels.peers import PeerMemory, PeerRegion
from negamax.kernels.sampling.op import CANDIDATES, RowSampling
from negamax.kernels.sampling.triton import draw_leading, pick


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def int64(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int64)


def group_of(world: int) -> Any:
    def region(words: int) -> PeerRegion:
        return PeerRegion(int64(world + 1), empty(256, dtype=torch.int32), 256, words)

    tokens, picked = region(2 * 6144), region(2 * CANDIDATES)
    peers = PeerMemory(0, world, region(3072), region(2), picked, tokens=tokens)
    return SimpleNamespace(size=world, rank=0, peers=peers)


def exchange_rows(group: Any, num_tokens: int) -> None:
    for width in (3072, 6144):
        norm = prepare(empty(width), 1e-6, quantize=True)
        all_reduce_add_rms(empty(num_tokens, width), empty(num_tokens, width), norm, group)
        experts = ExpertRanges(empty(group.size, dtype=torch.int32), 256 // group.size)
        ids = empty(num_tokens, 8, dtype=torch.int32)
        columns = [
            empty(num_tokens, 8, dtype=torch.float32),
            empty(num_tokens, width, dtype=torch.float8_e4m3fn),
            empty(num_tokens, width // 128, dtype=torch.float32),
        ]
        dispatch(ids, columns, experts=experts, group=group, num_rows=num_tokens)
        all_ids = empty(group.size * num_tokens, 8, dtype=torch.int32)
        combine(empty(group.size * num_tokens, 8, width), all_ids, experts=experts, group=group)
    for heads in (8, 48, 64):
        results = PartialResults.empty(empty(num_tokens, heads, 128))
        merge_partials(results, group, first=0, count=heads // group.size, quantize=True)


def exchange_choices(group: Any, num_tokens: int) -> None:
    columns = int64(65), int64(num_tokens), int64(num_tokens)
    rows = RowSampling(empty(65, 4, dtype=torch.float32), *columns)
    logits = empty(num_tokens, 200_064 // group.size, dtype=torch.float32)
    picked = pick(logits, rows, first_id=0, group=group)
    draw_leading(logits, rows, first_id=0, otherwise=picked, group=group)
    metadata: Any = SimpleNamespace(
        positions=int64(num_tokens), token_slots=int64(num_tokens),
        block_tables=empty(65, 64, dtype=torch.int32),
        num_actual_tokens=empty(1, dtype=torch.int32),
    )  # fmt: skip
    for heads in {1, max(1, 4 // group.size)}:
        shard = SimpleNamespace(ranks=group.size, rank=0, first_head=0)
        shape: Any = SimpleNamespace(kv_heads=heads, topk_blocks=16, shard=shard)
        constants = SelectionConstants(
            HEADS=heads, DIM=128, BLOCK=128, PER_BLOCK=1, TOPK=16, TOPK_POW2=16, INIT=0, LOCAL=1,
            BLOCK_M=16, BLOCK_D=128, DOT=triton.language.bfloat16, RANKS=group.size,
        )  # fmt: skip
        merge_shards(int64(1, num_tokens, 4, 16), MergePlan(metadata, shape, constants), group)


def exchange_sums(group: Any, num_tokens: int) -> None:
    heads, kv_heads = 48 // group.size, max(1, 8 // group.size)
    weight = empty((heads + kv_heads) * 128, dtype=torch.float32)
    norm = attention.prepare_qk_norm(
        weight, heads=heads, kv_heads=kv_heads, eps=1e-6, ranks=group.size
    )
    rotation = empty(num_tokens, 64, dtype=torch.float32)
    cache = KvCache(empty(8, kv_heads, 64, 128), empty(8, kv_heads, 64, 128))
    qkv, rows = empty(num_tokens, (heads + 2 * kv_heads) * 128), int64(num_tokens * kv_heads)
    qk_norm_rope_write(qkv, norm, TokenPlaces(rotation, rotation, rows), cache, group=group)


def main() -> None:
    platform = PLATFORMS["sm_90"]
    driver.set_active(Driver(GPUTarget("cuda", 90, platform.warp_size)))
    platforms.platform_of = lambda device: platform  # type: ignore[assignment]
    about: dict[str, Any] = {}

    def launch(kernel: Any, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            code = kernel.run(*args, grid=grid, warmup=True, **kwargs).asm
            found = {"kernel": kernel.fn.__name__, "torn": reads_torn_words(code)}
            polls = "isVolatile = true" in code["ttgir"]
            print(json.dumps({**about, **found, "polls": polls}), flush=True)

        return run

    triton.JITFunction.__getitem__ = launch
    with without_memory(), torch.inference_mode():
        for world in map(int, sys.argv[1:]):
            group = group_of(world)
            for num_tokens in (1, 64):
                about = {"world": world, "tokens": num_tokens}
                for exchange in (exchange_rows, exchange_choices, exchange_sums):
                    exchange(group, num_tokens)


if __name__ == "__main__":
    main()
