"""Make small host pools, and check copies between KV blocks and host blocks."""

import torch

from negamax.config.kv_cache import KvCacheSpec
from negamax.scheduler.step import HostCopies, StepPlan
from negamax.worker.host_pool import HostPool
from negamax.worker.kv_cache import allocate

CPU = torch.device("cpu")


def make_pool(
    num_host_blocks: int, device: torch.device = CPU
) -> tuple[list[dict[str, torch.Tensor]], HostPool]:
    """Make a pool for two kinds of layers with caches of three types, filled with random bytes."""
    key, index = KvCacheSpec("k", 2, 8), KvCacheSpec("index", 1, 16, dtype="float32")
    draft = KvCacheSpec("v", 2, 8, dtype="float8_e4m3fn")
    specs = [[key, index], [key], [key, index], [draft]]
    caches = allocate(specs, 9, block_size=4, dtype=torch.bfloat16, ranks=1, device=device)
    for layer in caches:
        for cache in layer.values():
            cache.view(torch.uint8).random_(0, 255)
    return caches, HostPool(caches, num_host_blocks, block_size=4, device=device)


def read_block(caches: list[dict[str, torch.Tensor]], block: int) -> list[list[int]]:
    found = (cache[block] for layer in caches for cache in layer.values())
    return [each.view(torch.uint8).flatten().tolist() for each in found]


def make_plan(step_id: int, *columns: list[int]) -> StepPlan:
    return StepPlan(step_id, [], [], [], [], [], [], [], copies=HostCopies(*columns))


def check_copies(device: torch.device, piece: int) -> None:
    caches, pool = make_pool(6, device)
    pool._piece = min(piece, pool._piece)
    assert pool.block_bytes == 4 * (3 * 2 * 8 * 2 + 2 * 16 * 4 + 2 * 8)
    before = [read_block(caches, block) for block in range(9)]
    progress = pool.run(make_plan(3, [7, 2, 5, 0], [4, 5, 0, 2], [], []))
    assert progress.read() == -1  # A store does not count as a load.
    assert [read_block(caches, block) for block in range(9)] == before
    progress = pool.run(make_plan(4, [1], [1], [5, 4, 2, 0], [8, 3, 1, 6]))
    assert pool.await_copies(4, seconds=1) and progress.read() == 4
    sources = [0, 0, 2, 7, 4, 5, 5, 7, 2]  # source of each block
    assert [read_block(caches, block) for block in range(9)] == [before[at] for at in sources]
    pool.close()
