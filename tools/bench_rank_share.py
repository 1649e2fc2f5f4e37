"""Measure one tensor-parallel rank of a model on a single GPU, without communication.

    python tools/bench_rank_share.py --ranks 4 --model minimax-m3-mxfp8 --kv-cache-dtype fp8 \
        --index-cache-dtype fp8 1000x65:1,4,16,64,100 131072x65:4 [--drafts 2.83] [--json FILE]

The bundled spec gets the heads, widths and vocabulary of one of `--ranks` ranks. All layers of a
model that needs several GPUs then run on one GPU, with a rank's kernels, shapes and bytes. The run
has no communication: no all-reduces, no exchange of the sampler's candidates or of sharded index
keys. The output is meaningless.

A workload is INPUTxOUTPUT:REQUESTS[,REQUESTS ...]. Prompts longer than one step run once, and
decode is timed with cached prompts. `--drafts LENGTH` times each workload without drafts and with
`--num-drafts` draft tokens. A random share of the drafts is accepted, so that a step yields LENGTH
tokens. The draft's `fc` is not sharded.
"""

import argparse
import json
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from negamax.bench import offline
from negamax.bench.group import Group
from negamax.config.model_spec import ModelSpec
from negamax.engine.core.setup import start_loop
from negamax.models.registry import DRAFTS, FAMILIES
from negamax.options.engine import EngineOptions
from negamax.parallel.layout import ParallelLayout
from negamax.scheduler.draft_length import FixedDraftLength

CUT = ("num_heads", "num_kv_heads", "vocab_size", "draft_vocab_size", "intermediate_size",
       "expert_width", "shared_width", "dense_width")  # fmt: skip
OWN_DRAFTS = {
    "minimax-m2": "minimax-m2.5-eagle3",
    "minimax-m3": "minimax-m3-eagle3",
    "minimax-m3.1": "minimax-m3.1-dspark",
}
ONE_STEP = 8192  # tokens


def share_of(spec: ModelSpec, ranks: int) -> ModelSpec:
    """Return the spec of one shard for `ranks` ranks. A replicated KV head stays whole."""
    names = {each.name for each in fields(spec)}
    sizes = {name: getattr(spec, name) for name in CUT if name in names}
    wrong = [name for name, size in sizes.items() if size % ranks and name != "num_kv_heads"]
    if wrong:
        raise SystemExit(f"{ranks} ranks do not divide {', '.join(wrong)} of this model")
    changed: dict[str, Any] = {name: max(1, size // ranks) for name, size in sizes.items()}
    if sparse := getattr(spec, "sparse", None):
        heads = max(1, sparse.index_heads // ranks)
        changed["sparse"] = replace(sparse, index_heads=heads)
    if "mask_token_id" in names:
        changed["mask_token_id"] = 0
    return replace(spec, bos_token_id=0, eos_token_ids=(1,), **changed)


def become_share(ranks: int) -> None:
    """Replace the bundled specs of this process by the shard of one of `ranks` ranks."""
    for family in (*FAMILIES.values(), *DRAFTS.values()):
        specs = family.bundled
        assert isinstance(specs, dict)
        specs |= {name: share_of(spec, ranks) for name, spec in specs.items()}


def workload(text: str) -> offline.OfflineWorkload:
    """Parse INPUTxOUTPUT:REQUESTS,..."""
    lengths, requests = text.split(":")
    input_len, output_len = map(int, lengths.split("x"))
    return offline.OfflineWorkload(tuple(map(int, requests.split(","))), input_len, output_len)


def bench(
    options: EngineOptions, workloads: list[offline.OfflineWorkload], draft_lengths: list[int]
) -> list[dict[str, Any]]:
    """Run all workloads. Return the runs in the format of `negamax bench offline`."""
    started = time.perf_counter()
    loop, info = start_loop(options)
    tokens = info.num_kv_blocks * info.block_size
    print(f"ready after {time.perf_counter() - started:.1f} s, a cache of {tokens:,} tokens")
    (rank,), runs = loop._scheduler.ranks, []
    try:
        for number, each in enumerate(workloads):
            is_long = each.input_len > ONE_STEP
            for length in draft_lengths:
                # A prompt that runs once is equal with and without drafts.
                seed = 2 * number + (length > 0 and not is_long)
                how = {"seed": seed, "cached_prompts": is_long, "no_distinct_experts": bool(length)}
                seeded = replace(each, **how)
                if len(draft_lengths) > 1:
                    rank._draft_length = FixedDraftLength(length)
                print(f"{each.input_len} + {each.output_len} tokens, {length} drafts", flush=True)
                group = Group(ParallelLayout.of(options.parallel))
                found = offline._measure_all(loop, info, seeded, group, say=print)
                runs += [run | {"input_len": each.input_len, "drafts": length} for run in found]
    finally:
        loop.shutdown()
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", type=workload, nargs="+")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--model", default="minimax-m2")
    parser.add_argument("--quantization")
    parser.add_argument("--num-hidden-layers", type=int)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--index-cache-dtype", default="auto")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.92)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--drafts", type=float, metavar="LENGTH")
    parser.add_argument("--num-drafts", type=int, default=3)
    parser.add_argument("--json", type=Path)
    words = vars(parser.parse_args())
    workloads, ranks, file = (words.pop(name) for name in ("workloads", "ranks", "json"))
    length, num_drafts, draft_lengths = words.pop("drafts"), words.pop("num_drafts"), [0]
    if length is not None:
        family = max(name for name in OWN_DRAFTS if words["model"].startswith(name))
        words["speculative_config"] = {
            "model": OWN_DRAFTS[family], "num_speculative_tokens": num_drafts,
            "rejection_sample_method": "synthetic", "synthetic_acceptance_length": length,
        }  # fmt: skip
        draft_lengths.append(num_drafts)
    longest = max(each.input_len + each.output_len for each in workloads)
    most = max(max(each.concurrency) for each in workloads)
    become_share(ranks)
    words |= {"load_format": "synthetic", "max_model_len": longest, "max_num_seqs": most}
    options = EngineOptions(**words)
    runs = bench(options, workloads, draft_lengths)
    if file:
        file.write_text(json.dumps({"ranks": ranks, "options": asdict(options), "runs": runs}))


if __name__ == "__main__":
    main()
