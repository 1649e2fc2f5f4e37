"""Check that collectives over the GPUs of a machine are bit-identical on all ranks.

`python3 tests/gpu/test_collectives.py [part ...] [file.json]` runs all parts or the named ones, and
prints microseconds per call beside those of NCCL and torch.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial, reduce
from operator import add
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))
# The tests do not need multicast, and not every machine allows it.
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from negamax.kernels.peers import Collective
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout

HIDDEN = 3072
VOCAB = 200_064
MAX_ROWS = 256
MAX_TOKENS = 8192
EXPERTS, TOP_K = 256, 8
ROWS = (1, 4, 16, 64, 100, 128)
STEPS = 2000

Findings = dict[str, Any]


def num_ranks() -> int:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return min(4, 1 << (count.bit_length() - 1)) if count else 0


Part = Callable[[ParallelContext, torch.device], Findings]


def one_rank(rank: int, folder: str, parts: dict[str, Part], sizes: dict[str, int]) -> None:
    """Run parts on one rank. `sizes` describe the layout; data-parallel ranks exchange tokens."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.cuda.set_stream(torch.cuda.Stream(device))
    context = ParallelContext.nccl(
        ParallelLayout(rank=rank, **sizes), f"{folder}/meet", device=device, hidden_size=HIDDEN,
        max_tokens=MAX_TOKENS, max_rows=MAX_ROWS, is_one_sided="dp" in sizes,
    )  # fmt: skip
    found = {}
    for name, part in parts.items():
        began = time.perf_counter()
        found[name] = part(context, device)
        torch.cuda.synchronize()
        if rank == 0:
            print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    context.close()


def spawn(parts: dict[str, Part], **sizes: int) -> list[dict[str, Findings]]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(one_rank, args=(folder, parts, sizes), nprocs=num_ranks())
        files = [Path(folder, f"{rank}.json") for rank in range(num_ranks())]
        return [json.loads(file.read_text()) for file in files]


@cache
def findings(parts: tuple[str, ...]) -> list[dict[str, Findings]]:
    return spawn({name: PARTS[name] for name in parts}, tp=num_ranks())


# --- parts, each on every rank -------------------------------------------------------------------


class Layer:
    """Hold the inputs of `all_reduce_add_rms` on every rank: x of all ranks, residual and norm."""

    def __init__(
        self, num_rows: int, parts: int, group: Collective, device: torch.device, *,
        seed: int = 0, quantize: bool = True,
    ) -> None:  # fmt: skip
        from negamax.kernels.norm import triton as norm_kernels

        generator = torch.Generator(device).manual_seed(1000 * seed + 10 * num_rows + parts)
        shape = (group.size, num_rows, parts, HIDDEN)
        everyones = torch.randn(shape, generator=generator, device=device).bfloat16()
        self.x = everyones[group.rank].contiguous()
        self.residual = torch.randn(num_rows, HIDDEN, generator=generator, device=device).bfloat16()
        self.start = self.residual.clone()
        weight = (1 + 0.2 * torch.randn(HIDDEN, generator=generator, device=device)).bfloat16()
        self.norm = norm_kernels.prepare(weight, 1e-6, quantize=quantize)
        # Additions have the order of the kernels; in another order one sum in millions differs.
        sums = reduce(add, everyones.float().unbind(dim=2)).bfloat16().float()
        total = reduce(add, sums)
        self.expected_residual = self.start.clone()
        self.expected = norm_kernels.add_rms(total.bfloat16(), self.expected_residual, self.norm)

    def __call__(self, group: Collective) -> None:
        self.residual.copy_(self.start)
        self.again(group)

    def again(self, group: Collective) -> None:
        from negamax.kernels.collectives import triton as kernels

        self.out = kernels.all_reduce_add_rms(self.x, self.residual, self.norm, group)

    def differences(self, mine: slice = slice(None)) -> Tensor:
        pairs = [(self.residual[mine], self.expected_residual[mine])]
        if self.norm.quantize:
            pairs.append((self.out.hidden, self.expected.hidden[mine]))
            pairs.append((self.out.q.view(torch.uint8), self.expected.q.view(torch.uint8)))
            pairs.append((self.out.scale, self.expected.scale))
        else:
            pairs += 3 * [(self.out, self.expected)]
        return torch.stack([(got != want).sum() for got, want in pairs])

    def shard_differences(self, group: Collective) -> Tensor:
        """Return the differences for sharded rows. Residual and plain rows are this rank's."""
        shard = -(-len(self.residual) // group.size)
        return self.differences(slice(group.rank * shard, (group.rank + 1) * shard))


class Router:
    def __init__(self, device: torch.device) -> None:
        from negamax.kernels.moe import triton as moe

        generator = torch.Generator(device).manual_seed(5)
        gate = torch.randn(EXPERTS, HIDDEN, generator=generator, device=device) * HIDDEN**-0.5
        self.gate = moe.prepare_gate(gate, torch.randn(EXPERTS, generator=generator, device=device))
        self.route = moe.route

    def __call__(self, x: Any, *, active: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.route(x, self.gate, top_k=TOP_K, active=active)

    def in_shards(self, x: Tensor, world: int, *, active: Tensor | None) -> tuple[Tensor, Tensor]:
        shard = -(-len(x) // world)
        parts = [
            self(x[first : first + shard], active=None if active is None else active - first)
            for first in range(0, len(x), shard)
        ]
        ids, weights = zip(*parts, strict=True)
        return torch.cat(ids), torch.cat(weights)


def error_of(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def sums(context: ParallelContext, device: torch.device) -> Findings:
    """Check all sizes. Rows beyond the region's capacity are added in bf16."""
    group = context.attention_group
    wrong = {}
    sizes = (1, 1), (1, 8), (3, 8), (16, 1), (47, 2), (48, 1), (100, 8), (128, 1), (256, 1)
    for num_rows, parts in sizes:
        layer = Layer(num_rows, parts, group, device)
        layer(group)
        wrong[f"T={num_rows} P={parts}"] = layer.differences().tolist()
    errors = {}
    for num_rows in (257, 300, 511):
        many = Layer(num_rows, 2, group, device)
        many(group)
        errors[f"T={num_rows}"] = error_of(many.residual, many.expected_residual)
    return {"peers": group.peers is not None, "wrong": wrong, "errors": errors}


def steps(context: ParallelContext, device: torch.device) -> Findings:
    """Alternate two graphs and eager calls of changing size, and check each on the device."""
    group = context.attention_group
    layers = {
        num_rows: Layer(num_rows, 1, group, device, seed=num_rows)
        for num_rows in (1, 5, 16, 64, 100, 300)
    }
    wrong = torch.zeros(4, dtype=torch.int64, device=device)
    graphs = {}
    for num_rows in (5, 64):
        layer = layers[num_rows]
        layer(group)  # The call compiles the kernels before the capture.
        layer.differences()
        graphs[num_rows] = capture(
            lambda layer=layer: [(layer(group), wrong.add_(layer.differences())) for _ in range(4)]
        )
    for step in range(STEPS // 10):
        for num_rows in (5, 64):
            graphs[num_rows].replay()
        for num_rows in (1, 100) if step % 3 else (16,):
            layers[num_rows](group)
            wrong.add_(layers[num_rows].differences())
        if step % 50 == 0:
            layers[300](group)
    return {"wrong": wrong.tolist()}


def sharded(context: ParallelContext, device: torch.device) -> Findings:
    """Check and time many rows, sharded over the ranks, with routing, in graphs and eagerly."""
    from negamax.kernels.activations import ShardedActivations
    from negamax.kernels.collectives import triton as kernels

    group, router = context.attention_group, Router(device)
    wrong, errors = {}, {}
    for num_rows, parts in ((512, 1), (1000, 8), (1001, 1), (2048, 1), (8192, 1)):
        layer = Layer(num_rows, parts, group, device)
        for active in (None, torch.tensor([num_rows * 5 // 8], dtype=torch.int32, device=device)):
            layer(group)
            assert isinstance(layer.out, ShardedActivations)
            chosen = router(layer.out, active=active)
            counts = layer.shard_differences(group).tolist()
            of_shards = router.in_shards(layer.expected.hidden, group.size, active=active)
            pairs = zip(chosen, of_shards, strict=True)
            counts += [int((got != want).sum()) for got, want in pairs]
            wrong[f"T={num_rows} P={parts} active={active is not None}"] = counts
        want = layer.expected.dequantize()
        errors[f"FP8 T={num_rows}"] = error_of(want, layer.expected.hidden)
        whole_ids = router(layer.expected)[0].sort().values
        layer(group)  # A sum separates two gathers of selected experts.
        ids = router(layer.out)[0].sort().values
        errors[f"experts T={num_rows}"] = float((whole_ids != ids).float().mean())
        if num_rows % group.size == 0:
            layer.residual.copy_(layer.start)
            # NCCL sums these rows in bf16.
            out = kernels._sharded_by_group(layer.x, layer.residual, layer.norm, group)
            errors[f"NCCL T={num_rows}"] = error_of(out.dequantize(), want)
    plain = Layer(1000, 1, group, device, quantize=False)
    plain(group)
    wrong["T=1000 plain"] = plain.shard_differences(group).tolist()
    many = torch.zeros(4, dtype=torch.int64, device=device)
    layers = [
        Layer(rows, parts, group, device, seed=rows, quantize=q) for rows, parts, q in STEP_ROWS
    ]

    def step(chosen: list[Layer]) -> None:
        for layer in chosen:
            layer(group)
            if layer.norm.quantize:
                router(layer.out)
            many.add_(layer.shard_differences(group))

    step(layers)
    graphs = [capture(lambda: step(layers)), capture(lambda: step(layers[::-1]))]
    for turn in range(STEPS // 40):
        graphs[turn % 3 % 2].replay()
        if turn % 10 == 0:
            step(layers[1:])
    wrong["many"] = many.tolist()
    return {"wrong": wrong, "errors": errors, "times": shard_times(context, device, router)}


# rows, parts, quantize
STEP_ROWS = ((512, 1, True), (1000, 8, True), (999, 1, False), (2048, 1, True))


def shard_times(context: ParallelContext, device: torch.device, router: Router) -> Findings:
    """Return microseconds per call in a graph for rows sharded by peers, by NCCL, and unsharded."""
    from negamax.kernels.collectives import tiles
    from negamax.kernels.collectives import triton as kernels
    from negamax.kernels.norm import triton as norm_kernels

    group: Any = context.attention_group
    found: Findings = {}
    original = tiles.tiles_for
    for num_rows in (1, 4):
        layer, row = Layer(num_rows, 1, group, device), {}
        for warps in (8, 16):
            tiles.tiles_for = lambda device, _warps=warps: tiles.ExchangeTiles(row_warps=_warps)
            row[f"{warps} warps"] = microseconds(partial(layer.again, group), context)
        found[f"few rows, T={num_rows}"] = row
    tiles.tiles_for = original
    for num_rows in (512, 1024, 2048, 8192):
        layer = Layer(num_rows, 1, group, device)

        def whole(layer: Layer = layer) -> None:
            norm_kernels.add_rms(group.all_reduce(layer.x), layer.residual, layer.norm)

        own, again = (layer.x, layer.residual, layer.norm, group), partial(layer.again, group)
        row, peers = {}, group.peers
        group.peers = replace(peers, shards=replace(peers.shards, barrier=lambda: None))
        row["without barriers"] = microseconds(again, context, repeats=10)
        group.peers = peers
        layer(group)
        for label, call in (
            ("ours", again),
            ("barrier", peers.shards.barrier),
            ("by NCCL", partial(kernels._sharded_by_group, *own)),
            ("not sharded", whole),
            ("routing", partial(router, layer.out)),
            ("not sharded, routing", partial(router, layer.expected)),
        ):
            row[label] = microseconds(call, context, repeats=10)
        found[f"shards T={num_rows}"] = row
    return found


def sampling_inputs(num_rows: int, device: torch.device) -> tuple[Any, Any]:
    from negamax.kernels.sampling.op import RowSampling

    numbers = torch.arange(num_rows, device=device)
    columns = numbers * 12_345, numbers.flip(0), numbers + 17
    filters = torch.tensor([1.0, 40.0, 0.95, 0.0], device=device).repeat(num_rows, 1)
    ones = torch.ones(num_rows, 4, device=device)
    return RowSampling(ones, *columns), RowSampling(filters, *columns)


def picks(context: ParallelContext, device: torch.device) -> Findings:
    """Check that sampling from vocabulary shards equals sampling from the whole vocabulary."""
    from negamax.kernels.sampling import op as spec
    from negamax.kernels.sampling import triton as kernels

    group = context.attention_group
    share = VOCAB // group.size
    mine = slice(group.rank * share, (group.rank + 1) * share)
    generator = torch.Generator(device).manual_seed(7)
    wrong: Findings = {}
    for num_rows in (1, 3, 100, MAX_ROWS + 1):
        logits = torch.randn(num_rows, VOCAB, generator=generator, device=device) * 3
        logits[0, 5] = logits[0, VOCAB - 9] = 100.0
        rest, leading = sampling_inputs(num_rows, device)
        temperatures = (torch.arange(num_rows, device=device) % 3).float()
        rest.filters.copy_(temperatures[:, None].expand(-1, 4))
        otherwise = {"otherwise": torch.zeros_like(rest.slots)}
        if num_rows > 2:
            logits[2, 100_000] = torch.nan
        leading.filters[1::4, 1] = 0.0
        own = {"first_id": mine.start, "group": group}
        for name, rows, more in (("pick", rest, {}), ("draw_leading", leading, otherwise)):
            want = getattr(spec, name)(logits, rows, first_id=0, **more)
            for _ in range(3):
                got = getattr(kernels, name)(logits[:, mine].contiguous(), rows, **own, **more)
                wrong[f"{name} R={num_rows}"] = int((got != want).sum())
    wrong["world_min"] = context.world_min(10 + context.layout.rank) - 10
    return {"wrong": wrong}


# tokens and queries of each sequence, and the dtype of index keys
SELECTIONS = (
    ([1000, 32_000], [1, 1], torch.bfloat16), ([32_000] * 16, [1] * 16, torch.float8_e4m3fn),
    ([128_000], [1], torch.float8_e4m3fn), ([128_000] * 4, [1] * 4, torch.float8_e4m3fn),
    ([1_000_000], [1], torch.float8_e4m3fn), ([8192, 40_000], [300, 4096], torch.bfloat16),
)  # fmt: skip


def selections(context: ParallelContext, device: torch.device) -> Findings:
    """Compare block selection from index-key shards with selection from all keys; time both."""
    from negamax.kernels.attention.metadata import attention_metadata
    from negamax.kernels.block_sparse import triton as kernels
    from negamax.kernels.block_sparse.selection import IndexShard, SparseShape

    group, heads = context.attention_group, 4
    first, count = group.rank * heads // group.size, max(1, heads // group.size)
    wrong, taken = {}, {}
    for lengths, queries, dtype in SELECTIONS:
        generator = torch.Generator(device).manual_seed(0)
        shape = SparseShape(count, 16, 128, 128, 16)
        sharded = replace(shape, shard=IndexShard(group.rank, group.size, heads, first))
        width = -(-max(lengths) // 128)
        cache = torch.randn(width * len(lengths), 1, 128, 128, generator=generator, device=device)
        cache = cache.to(dtype)
        shard = cache.view(torch.uint8)[group.rank :: group.size].contiguous().view(dtype)
        tables = torch.randperm(len(cache), generator=generator, device=device).int()
        decodes = len(queries) if max(queries) == 1 else 0
        metadata = attention_metadata(
            tables.view(len(lengths), width), lengths, queries, num_decodes=decodes
        )
        num_tokens = sum(queries)
        index_q = torch.randn(num_tokens, heads, 128, generator=generator, device=device).bfloat16()
        own_q = index_q[:, first : first + count].contiguous()
        whole, part = (kernels.plan_select(metadata, of) for of in (shape, sharded))
        merge = kernels.plan_merge_shards(metadata, sharded)

        def of_all(own_q=own_q, cache=cache, plan=whole) -> Any:
            return kernels.select(own_q, cache, plan)

        def of_shards(index_q=index_q, shard=shard, plan=part, merge=merge) -> Any:
            return kernels.merge_shards(kernels.select_shard(index_q, shard, plan), merge, group)

        label = f"{len(lengths)} x {max(lengths)} {num_tokens}"
        want = of_all()
        differing = torch.zeros(2, dtype=torch.int64, device=device)

        def step(want=want, of_shards=of_shards, differing=differing) -> None:
            got = of_shards()
            counts = [(got.ids != want.ids).sum(), (got.pages != want.pages).sum()]
            differing.add_(torch.stack(counts))

        repeat(step)
        wrong[label] = differing.tolist()
        taken[label] = {
            "all keys": microseconds(of_all, context),
            "a shard": microseconds(of_shards, context),
        }
    return {"wrong": wrong, "times": taken}


def merges(context: ParallelContext, device: torch.device) -> Findings:
    """Compare merged attention over a sharded KV cache with an all-gather by bits; time both."""
    from negamax.kernels.cache_shards.op import PartialResults
    from negamax.kernels.cache_shards.triton_merge import merge_partials

    group, count = context.attention_group, 8
    own = {"first": group.rank * count, "count": count}
    wrong, taken = {}, {}
    for num_tokens in (1, 64, MAX_ROWS, MAX_ROWS + 44):
        generator = torch.Generator(device).manual_seed(group.rank)
        q = torch.empty(num_tokens, group.size * count, 128, dtype=torch.bfloat16, device=device)
        parts = PartialResults.empty(q)
        parts.out.copy_(torch.randn(parts.out.shape, generator=generator, device=device))
        parts.lse.copy_(torch.randn(parts.lse.shape, generator=generator, device=device))
        parts.lse[group.rank :: 3] = -torch.inf
        want = merge_partials(parts.gathered(group), None, **own)
        differing = torch.zeros(1, dtype=torch.int64, device=device)

        def step(parts=parts, want=want, differing=differing) -> None:
            differing.add_((merge_partials(parts, group, **own) != want).sum())

        repeat(step)
        wrong[f"T={num_tokens}"] = int(differing)

        def gathered(parts=parts) -> Any:
            return merge_partials(parts.gathered(group), None, **own)

        taken[f"merge T={num_tokens}"] = {
            "ours": microseconds(partial(merge_partials, parts, group, **own), context, repeats=20),
            "all-gather": microseconds(gathered, context, repeats=20),
        }
    return {"wrong": wrong, "times": taken}


def times(context: ParallelContext, device: torch.device) -> Findings:
    """Return microseconds per call in a graph for our sums, NCCL's and torch's, and sampling."""
    import torch.distributed._symmetric_memory as symm_mem

    from negamax.kernels.collectives import tiles
    from negamax.kernels.sampling import triton as sampling

    group = context.attention_group
    everyone = dist.group.WORLD
    found: Findings = {}
    original = tiles.two_shot
    for num_rows in ROWS:
        layer = Layer(num_rows, 1, group, device)
        row = found[f"sum T={num_rows}"] = {}
        for label, two_shot in (("ours, one-shot", False), ("ours, two-shot", True)):
            tiles.two_shot = lambda *args, _chosen=two_shot, **sizes: _chosen
            row[label] = microseconds(partial(layer.again, group), context)
        tiles.two_shot = original
        shared = symm_mem.empty(num_rows * HIDDEN, dtype=torch.bfloat16, device=device)
        symm_mem.rendezvous(shared, everyone)
        for label, sum_up in (
            ("torch one-shot", torch.ops.symm_mem.one_shot_all_reduce),
            ("torch two-shot", torch.ops.symm_mem.two_shot_all_reduce_),
        ):
            row[label] = microseconds(partial(sum_up, shared, "sum", everyone.group_name), context)
        row["NCCL"] = microseconds(partial(dist.all_reduce, layer.x, group=everyone), context)
    for num_rows in (256, 512, 1024, 2048):
        layer = Layer(num_rows, 1, group, device)
        found[f"sum T={num_rows}"] = {
            label: microseconds(call, context, repeats=10)
            for label, call in (
                ("ours", partial(layer.again, group)),
                ("ours without norm", partial(group.all_reduce, layer.x)),
                ("NCCL", partial(dist.all_reduce, layer.x, group=everyone)),
            )
        }
    for num_rows in (1, 16, 100):
        logits = torch.randn(num_rows, VOCAB // group.size, device=device)
        rest, leading = sampling_inputs(num_rows, device)
        otherwise = {"otherwise": torch.zeros_like(rest.slots)}
        for name, rows, more in (("pick", rest, {}), ("draw_leading", leading, otherwise)):
            call = partial(getattr(sampling, name), logits, rows, first_id=0, group=group, **more)
            found[f"{name} R={num_rows}"] = {"ours": microseconds(call, context)}
    return found


PARTS: dict[str, Part] = {
    part.__name__: part for part in (sums, steps, sharded, picks, selections, merges, times)
}


def repeat(step: Callable[[], object]) -> None:
    step()
    graph = capture(lambda: [step() for _ in range(3)])
    for _ in range(5):
        graph.replay()


def capture(calls: Callable[[], object]) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(
        graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
    ):
        calls()
    return graph


def microseconds(
    call: Callable[[], object],
    context: ParallelContext,
    *,
    repeats: int = 50,
    is_captured: bool = True,
) -> float:
    """Return the median of 7 runs of `repeats` calls, in a graph if `is_captured`."""

    def calls() -> None:
        for _ in range(repeats):
            call()

    call()
    run, taken = capture(calls).replay if is_captured else calls, []
    for _ in range(7):
        context.world_min(0)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        run()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end) * 1000 / repeats)
    return sorted(taken)[len(taken) // 2]


# --- tests ---------------------------------------------------------------------------------------

everything = tuple(PARTS)
several = pytest.mark.skipif(num_ranks() < 2, reason="needs two GPUs that reach each other")


def only_wrong(counts: Any) -> Any:
    if isinstance(counts, dict):
        return {label: own for label, own in counts.items() if only_wrong(own)}
    return [count for count in counts if count] if isinstance(counts, list) else counts


@several
@pytest.mark.parametrize("part", [part for part in PARTS if part != "times"])
def test_results_are_exact_on_every_rank_in_graphs_and_eagerly(part: str) -> None:
    """Check each part. FP8 and near ties of experts have separate tolerances."""
    for found in findings(everything):
        assert found["sums"]["peers"]
        assert not only_wrong(found[part]["wrong"])
        most = 5e-3 if part == "sums" else 0.05
        for label, error in found[part].get("errors", {}).items():
            assert error < (1e-3 if "experts" in label else most), label


@several
def test_times() -> None:
    show_times(findings(everything), everything)


def show_times(found: list[dict[str, Findings]], parts: tuple[str, ...]) -> None:
    for name in ("times", "sharded", "selections", "merges"):
        if name in parts:
            show([rank[name].get("times", rank[name]) for rank in found])


def show(found: list[Findings]) -> None:
    for label, row in found[0].items():
        slowest = {name: max(rank[label][name] for rank in found) for name in row}
        numbers = "  ".join(f"{name} {value:.2f}" for name, value in slowest.items())
        print(f"{label:12} {numbers}", flush=True)


def main() -> None:
    parts = tuple(name for name in sys.argv[1:] if name in PARTS) or everything
    files = [name for name in sys.argv[1:] if name not in PARTS]
    found = findings(parts)
    for rank, said in enumerate(found):
        for name in parts:
            if name != "times":
                print(rank, name, {key: own for key, own in said[name].items() if key != "times"})
    show_times(found, parts)
    for file in files:
        Path(file).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
