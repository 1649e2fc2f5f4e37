"""`negamax plan MODEL`: plan how to split a model over GPUs, without using a GPU."""

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import typer

from negamax.base.errors import ConfigError
from negamax.checkpoint.split import read_ranks
from negamax.cli.bench_options import MAX_COUNT, parse_counts
from negamax.cli.io import print_line
from negamax.cli.options import json_object, parse_count, setting
from negamax.config.embedded import QUOTED_NAMES
from negamax.config.model_spec import ModelSpec
from negamax.models.registry import bundled_names, bundled_spec, find_bundled_draft, format_hub_id
from negamax.options.engine import KV_CACHE_DTYPES, MAX_HOST_GIB, EngineOptions
from negamax.parallel.layout import ParallelLayout
from negamax.planner.cost import Drafts, Workload
from negamax.planner.gpus import GIB, GPUS, MEASURED, MEASURED_RANKS, find_gpu, visible_gpus
from negamax.planner.plan import Candidate, Hardware, Plan, make_plan
from negamax.planner.topology import LIMITS, Topology
from negamax.quantization import online

HELP = """Show how to split MODEL over GPUs: memory, predicted times, and the command to run.

The command reads only configuration files and needs no GPU. docs/parallelism.md lists the errors
of predicted times.
"""
_MOST_GPUS = 64
_MOST_ROWS, _MOST_REASONS = 6, 3  # Largest numbers of table rows and of reasons to print.
_FORMATS = ("fp8", "int8", "mxfp8", "int4", "nvfp4", "mxfp4")  # Values of --quantization.
FIRST_NODE = "node0"  # Name of the first machine in commands for several machines.
_GPU_NAMES = [gpu.name for gpu in GPUS.values()]
_TABLE_WIDTH = 100  # least width of the table, even if the terminal is narrower
_LOAD, _HARDWARE, _MODEL = "Expected load", "Hardware", "Model"


def command(
    *,
    model: str = typer.Argument(
        ...,
        metavar="MODEL",
        help=f"A local folder, a hub id, {QUOTED_NAMES}, or a bundled specification: "
        f"{', '.join(bundled_names())}.",
    ),
    as_json: bool = setting(False, "Print one JSON object.", "--json"),
    gpus: int | None = setting(
        None, "Set the number of GPUs. Default: all GPUs of this machine.", panel=_HARDWARE
    ),
    nodes: int = setting(1, "Set the number of machines that contain the GPUs."),
    gpu: str | None = setting(
        None,
        f"Choose the GPU: {', '.join(_GPU_NAMES)}. Default: the local GPU, or {MEASURED.name}.",
        choices=_GPU_NAMES,
    ),
    gpu_memory: float | None = setting(None, "Set the GiB of each GPU (default: memory of --gpu)."),
    gpu_memory_utilization: float = setting(
        EngineOptions.gpu_memory_utilization, "Limit the fraction of a GPU's memory that is used."
    ),
    max_model_len: int | None = setting(
        None,
        "Require that a request of this many tokens fits. Default: the largest request that fits.",
        panel=_MODEL,
        parser=parse_count,
        metavar="NUMBER",
    ),
    kv_cache_dtype: str = setting(
        "auto",
        f"Store the KV cache in this type: {', '.join(KV_CACHE_DTYPES)}.",
        choices=KV_CACHE_DTYPES,
    ),
    index_cache_dtype: str = setting(
        "auto", "Store MiniMax-M3's index keys in this type.", choices=KV_CACHE_DTYPES
    ),
    encoder_cache_tokens: int = setting(
        EngineOptions.encoder_cache_tokens, "Cache this many image tokens; 0: no images.", min=0
    ),
    quantization: str | None = setting(None, "Quantize as with `negamax serve --quantization`."),
    revision: str | None = setting(None, "Read this branch, tag or commit of a hub model."),
    speculative_config: str | None = setting(
        None, "Plan steps with draft tokens, as in `negamax serve`.", metavar="JSON"
    ),
    kv_offloading_size: float = setting(
        0.0, "Keep KV blocks in this many GiB of main memory per engine.", min=0, max=MAX_HOST_GIB
    ),
    concurrency: str = setting(
        "1,16,64,100",
        "Set one or several numbers of concurrent requests. The best latency is computed for the "
        "smallest number, and the best throughput for the largest number.",
        panel=_LOAD,
    ),
    input_len: int | None = setting(
        None, "Set the prompt tokens. Default: 1000, or as many as fit.", min=1, max=MAX_COUNT
    ),
    output_len: int | None = setting(
        None, "Set the output tokens. Default: 1000, or as many as fit.", min=1, max=MAX_COUNT
    ),
) -> None:
    """Exit with 0 if a topology fits and runs, else with 1."""
    hardware = _hardware(gpus, nodes, gpu, gpu_memory, gpu_memory_utilization)
    counts = sorted(parse_counts(concurrency, flag="--concurrency"))
    dtypes = {"kv_cache_dtype": kv_cache_dtype, "index_cache_dtype": index_cache_dtype}
    sizes = {"max_model_len": max_model_len, "gpu_memory_utilization": gpu_memory_utilization}
    names: dict[str, Any] = {"revision": revision, "quantization": quantization}
    names["encoder_cache_tokens"] = encoder_cache_tokens
    given = json_object("--speculative-config", speculative_config) or None
    names |= {"speculative_config": given, "kv_offloading_size": kv_offloading_size or None}
    engine = EngineOptions(_bundled(model), **names, **dtypes, **sizes)  # type: ignore[arg-type]
    spec, ranks, drafts = _model(engine)
    lengths = _lengths(input_len, output_len, engine, spec)
    workloads = [Workload(count, *lengths) for count in counts]
    planned = partial(
        make_plan,
        hardware=hardware,
        workloads=workloads,
        kv_dtype=kv_cache_dtype,
        index_dtype=index_cache_dtype,
        encoder_tokens=encoder_cache_tokens,
        max_model_len=engine.max_model_len,
        drafts=drafts,
        host_gib=kv_offloading_size,
    )
    plan = planned(spec, split_for=ranks)
    if as_json:
        print(json.dumps(_document(plan, engine, spec), indent=2))
    else:
        is_short = not plan.candidates and any(each.missing_bytes for each in plan.refused)
        _print(plan, engine, spec, remedy=_list_formats(spec, planned) if is_short else None)
    raise typer.Exit(0 if plan.candidates else 1)


def _hardware(
    gpus: int | None, nodes: int, name: str | None, gib: float | None, utilization: float
) -> Hardware:
    here = visible_gpus() if gpus is None or (name is None and gib is None) else []
    if gpus is None and not here:
        raise ConfigError("--gpus is missing, and this machine has no GPU", hint="pass --gpus N")
    gpus = len(here) if gpus is None else gpus
    if not 1 <= gpus <= _MOST_GPUS:
        raise ConfigError(f"--gpus is {gpus}; allowed: 1 to {_MOST_GPUS}")
    if nodes < 1 or gpus % nodes:
        allowed = f"a number that divides {gpus}, the number of GPUs"
        raise ConfigError(f"--nodes is {nodes}; allowed: {allowed}")
    gpu = find_gpu(name) if name is not None else here[0] if here else MEASURED
    if gib is not None:
        if not 1 <= gib <= 4096:
            raise ConfigError(f"--gpu-memory is {gib:g}; allowed: 1 to 4096 (GiB)")
        gpu = replace(gpu, memory=int(gib * GIB))
    return Hardware(gpu, gpus, nodes, utilization)


def _lengths(
    input_len: int | None, output_len: int | None, engine: EngineOptions, spec: ModelSpec
) -> tuple[int, int]:
    """Return prompt and answer length in tokens. Raises `ConfigError` if a request is too long."""
    asked = engine.max_model_len
    context_length = asked or spec.max_position_embeddings
    left = context_length - output_len if output_len else context_length // 2
    prompt = input_len or max(1, min(Workload.input_len, left))
    answer = output_len or max(1, min(Workload.output_len, context_length - prompt))
    if prompt + answer > context_length:
        limit = "--max-model-len" if asked else "the model's context length"
        refusal = f"--input-len and --output-len make requests of {prompt + answer} tokens"
        hint = "lower one length, or raise --max-model-len" if asked else "lower one length"
        raise ConfigError(f"{refusal}; {limit} is {context_length}", hint=hint)
    return prompt, answer


def _model(engine: EngineOptions) -> tuple[ModelSpec, list[ParallelLayout], Drafts | None]:
    """Return the model, the layouts of a split checkpoint, and the drafts. Raises `ConfigError`."""
    from negamax.engine.core.source import locate
    from negamax.quantization.names import quantized

    source = locate(replace(engine, load_format="synthetic", quantization=None))
    spec = source.spec
    quantization, _ = quantized(
        engine.quantization, spec.quantization, is_drawn=_is_bundled(engine.model)
    )
    draft = None if source.draft is None else source.draft.spec
    drafts = None if source.speculation is None else Drafts(source.speculation, draft)
    return replace(spec, quantization=quantization), read_ranks(source.tokenizer_folder), drafts


def _bundled(model: str) -> str:
    """Return the bundled name of a hub id, or `model` if there is no bundled name."""
    same = (name for name in bundled_names() if format_hub_id(name).lower() == model.lower())
    return next(same, model) if not Path(model).exists() else model


def _list_formats(spec: ModelSpec, planned: Callable[[ModelSpec], Plan]) -> str:
    """Return a line that lists the weight formats in which the model fits."""
    plain = replace(spec, quantization=None)
    fits = {name: planned(replace(plain, quantization=online.spec(name))) for name in _FORMATS}
    best = {name: each.fastest for name, each in fits.items() if each.fastest is not None}
    found = [f"{name} ({each.topology.label})" for name, each in best.items()]
    if not found:
        return "The model fits in no other format either: use more or larger GPUs."
    same = [
        name
        for name in bundled_names()
        if replace(bundled_spec(name), quantization=None) == plain
        and bundled_spec(name) != spec
        and planned(bundled_spec(name)).candidates
    ]
    return (
        f"The model fits in other formats: {', '.join([*same, *found])}. Choose a checkpoint in "
        "one of these formats, or add --quantization NAME to a checkpoint in BF16."
    )


def _is_bundled(model: str) -> bool:
    return model.lower() in bundled_names() and not Path(model).exists()


# Commands


def commands(
    each: Candidate, engine: EngineOptions, spec: ModelSpec, hardware: Hardware
) -> list[str]:
    """Return the command that starts a server, or one command for each machine."""
    model, start, given = engine.model, [], engine.speculative_config or {}
    # A server verifies draft tokens, so the command omits the plan's synthetic acceptance.
    drafts = {key: each for key, each in given.items() if "synthetic" not in (key[:9], each)}
    is_drawn = engine.quantization or find_bundled_draft(str(given.get("model")))
    if _is_bundled(model) and is_drawn:
        start = ["--load-format", "synthetic"]
    elif _is_bundled(model):
        model = format_hub_id(model)
    context_length = engine.max_model_len
    if context_length is None and each.context_length < spec.max_position_embeddings:
        context_length = each.context_length // 1024 * 1024
    sharding = "on" if each.shards_index else "off"
    words = ["negamax", "serve", model, *start, *each.topology.flags]
    nodes = each.topology.nodes(per_node=hardware.per_node)
    # One command starts all replicas of a machine. A replica on n machines needs n commands.
    replicas = each.topology.replicas // hardware.nodes if nodes == 1 else 1
    for name, value, default in (
        ("num-replicas", replicas or each.topology.replicas, 1),
        ("revision", engine.revision, None),
        ("quantization", engine.quantization, None),
        ("max-model-len", context_length, None),
        ("max-num-seqs", max(each.most_sequences, LIMITS.max_num_seqs), LIMITS.max_num_seqs),
        ("kv-cache-dtype", engine.kv_cache_dtype, "auto"),
        ("index-cache-dtype", engine.index_cache_dtype, "auto"),
        ("index-cache-sharding", sharding, "off"),
        ("encoder-cache-tokens", engine.encoder_cache_tokens, EngineOptions.encoder_cache_tokens),
        ("gpu-memory-utilization", hardware.utilization, EngineOptions.gpu_memory_utilization),
        ("speculative-config", json.dumps(drafts), "{}"),
        ("kv-offloading-size", f"{engine.kv_offloading_size or 0:g}", "0"),
    ):
        words += [] if value == default else [f"--{name}", str(value)]
    if nodes == 1:
        return [shlex.join(words)]
    words += ["--nnodes", str(nodes), "--master-addr", FIRST_NODE, "--node-rank"]
    return [shlex.join([*words, str(node)]) for node in range(nodes)]


# Output


def _document(plan: Plan, engine: EngineOptions, spec: ModelSpec) -> dict[str, Any]:
    hardware = plan.hardware
    return {
        "model": engine.model,
        "gpu": hardware.gpu.name,
        "gpu_memory_bytes": hardware.gpu.memory,
        "gpus": hardware.gpus,
        "nodes": hardware.nodes,
        "input_len": plan.workloads[0].input_len,
        "output_len": plan.workloads[0].output_len,
        "best": {use: each and each.topology.label for use, each in _best(plan).items()},
        "topologies": [
            _described(each.topology)
            | {
                "gpus": each.topology.gpus,
                "replicas": each.topology.replicas,
                "command": commands(each, engine, spec, hardware)[0],
                "commands": commands(each, engine, spec, hardware),
                "weight_bytes_per_gpu": each.memory.weights,
                "kv_bytes_per_token_per_gpu": each.memory.token,
                "kv_tokens": each.cache_tokens,
                "host_tokens": each.host_tokens,
                "max_model_len": each.context_length,
                "first_token_ms": 1e3 * each.prompt_seconds,
                "prefill_tokens_per_second": each.prefill_rate,
                "loads": [
                    {
                        "concurrency": workload.concurrency,
                        "running": found.concurrency,
                        "tpot_ms": 1e3 * found.token_seconds,
                        "draft_tokens": found.draft_tokens,
                        "tokens_per_second": found.tokens_per_second,
                    }
                    for workload, found in zip(plan.workloads, each.predictions, strict=True)
                ],
            }
            for each in _ordered(plan)
        ],
        "refused": [_described(each.topology) | {"reason": each.reason} for each in plan.refused],
    }


def _described(topology: Topology) -> dict[str, Any]:
    return {"topology": topology.label, "options": dict(topology.sizes)}


def _best(plan: Plan) -> dict[str, Candidate | None]:
    return {"latency": plan.fastest, "throughput": plan.busiest}


def _ordered(plan: Plan) -> list[Candidate]:
    """Return all candidates, first those with the best latency and the best throughput."""
    best = [each for each in _best(plan).values() if each is not None]
    return list(dict.fromkeys([*best, *plan.candidates]))


def _print(plan: Plan, engine: EngineOptions, spec: ModelSpec, *, remedy: str | None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    hardware, first = plan.hardware, plan.workloads[0]
    gpu = hardware.gpu
    where = f" in {hardware.nodes} machines" if hardware.nodes > 1 else ""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.width = max(_TABLE_WIDTH, console.width)
    print_line(
        f"{engine.model} on {hardware.gpus} x {gpu.name} ({gpu.memory / GIB:.1f} GiB){where}, "
        f"prompts of {first.input_len} and answers of {first.output_len} tokens"
    )
    for use, found in _best(plan).items():
        if found is not None:
            console.print(f"\nBest for {use}: {found.topology.label}")
            for line in commands(found, engine, spec, hardware):
                console.print(f"  {line}")
    for note in (*_notes(plan), *([] if remedy is None else [remedy])):
        console.print()
        print_line(note)
    if plan.candidates:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
        table.add_column("topology\nbest for", no_wrap=True)
        heads = ["weights\nKV/token", "KV tokens\nwindow", "1st, ms\nin, t/s"]
        for head in (*heads, *(f"{load.concurrency}: ms\nt/s" for load in plan.workloads)):
            table.add_column(head, justify="right", no_wrap=True)
        ordered = _ordered(plan)
        for each in ordered[:_MOST_ROWS]:
            table.add_row(*_row(each, plan))
        console.print()
        console.print(table)
        left_out = len(ordered) - _MOST_ROWS
        slower = f"{left_out} slower topologies are shown by --json. " if left_out > 0 else ""
        print_line(
            f"{slower}The first columns show the weights and the KV cache per token of a GPU, the "
            "tokens of all caches and of the longest request, and the speed of prompts. The last "
            "columns show ms per token and tokens per second by number of requests; * marks a "
            "number of requests that does not fit into the caches."
        )
    _print_refused(plan)


def _print_refused(plan: Plan) -> None:
    """Print why topologies do not run: the smallest lack of memory, and a few other reasons."""
    by_reason: dict[str, list[str]] = {}
    for each in sorted(plan.refused, key=lambda each: each.missing_bytes or inf):
        by_reason.setdefault(each.reason, []).append(each.topology.label)
    reasons = list(by_reason.items())
    num_short = len({each.reason for each in plan.refused if each.missing_bytes})
    shown = [*reasons[: min(1, num_short)], *reasons[num_short : num_short + _MOST_REASONS]]
    if shown:
        print("\nTopologies that do not run")
    for reason, labels in shown:
        more = f" and {len(labels) - 4} more" if len(labels) > 5 else ""
        print_line(f"  {', '.join(labels[: 4 if more else 5])}{more}: {reason}", indent=4)
    if len(reasons) > len(shown):
        print_line(f"  {len(reasons) - len(shown)} more reasons; --json lists all reasons.")


def _row(each: Candidate, plan: Plan) -> Iterator[str]:
    uses = [use for use, found in _best(plan).items() if found is each]
    yield f"{each.topology.label}\n{'both' if len(uses) == 2 else ''.join(uses)}"
    yield f"{each.memory.weights / GIB:.1f} GiB\n{each.memory.token / 1024:.1f} KiB"
    yield f"{each.cache_tokens:,}\n{each.context_length:,}"
    yield f"{1e3 * each.prompt_seconds:.0f}\n{each.prefill_rate:,.0f}"
    for workload, found in zip(plan.workloads, each.predictions, strict=True):
        mark = "*" if found.concurrency < workload.concurrency else ""
        yield f"{1e3 * found.token_seconds:.2f}{mark}\n{found.tokens_per_second:,.0f}"


def _notes(plan: Plan) -> Iterator[str]:
    gpu, per_node = plan.hardware.gpu, plan.hardware.per_node
    best = {each.topology for each in _best(plan).values() if each is not None}
    if any(each.ranks > per_node for each in best):
        yield f"Run one command on each machine; {FIRST_NODE} is an address of the first machine."
    for found in dict.fromkeys(each for each in _best(plan).values() if each is not None):
        counts = [each.draft_tokens for each in found.predictions]
        if any(counts) or found.host_tokens:
            label, said = found.topology.label, f"{counts} draft tokens per step"
            yield f"{label}: {said} by load; main memory holds {found.host_tokens:,} tokens."
    if not plan.candidates:
        yield "No topology fits and runs."
    elif not gpu.platform.is_measured:
        yield f"Times on {gpu.name} were never measured; they are scaled from {MEASURED.name}."
    if any(each.ranks > MEASURED_RANKS or each.tp < each.ranks or each.ep > 1 for each in best):
        yield (
            f"Only these splits were measured, on up to {MEASURED_RANKS} GPUs: tensor parallelism, "
            f"and PP2, PP2 TP2, DP2 EP2 and DP4 EP4 of MiniMax-M2 (docs/performance.md)."
        )
