"""`negamax plan MODEL`: how to split a model over GPUs, without touching one."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from negamax.base.errors import ConfigError
from negamax.checkpoint.split import ranks_of
from negamax.cli.bench_options import MAX_COUNT, parse_counts
from negamax.cli.lines import print_line
from negamax.cli.options import completion, parse_count
from negamax.config.embedded import QUOTED_NAMES
from negamax.config.model_spec import ModelSpec
from negamax.models.registry import bundled_names, published_name
from negamax.options.engine import KV_CACHE_DTYPES, EngineOptions
from negamax.parallel.layout import ParallelLayout
from negamax.planner.cost import Workload
from negamax.planner.gpus import GIB, GPUS, MEASURED, MEASURED_RANKS, find_gpu, visible_gpus
from negamax.planner.plan import Candidate, Hardware, Plan, Refused, make_plan
from negamax.planner.topology import LIMITS

HELP = """Show how MODEL may be split over GPUs: memory, predicted times, the command to type.

Reads configuration files only, and needs no GPU. Times are calculated: docs/parallelism.md says how
well that fits what was measured.
"""
_MOST_GPUS = 64
_MOST_ROWS = 12
FIRST_NODE = "node0"  # in commands for several machines
_TABLE_WIDTH = 100  # of what stands in columns, on a narrower terminal, too
_LOAD, _HARDWARE, _MODEL = "Expected load", "Hardware", "Model"


def _text(panel: str, flag: str, text: str) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=panel, show_default=False)


def command(
    *,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=f"A local folder, a hub id, {QUOTED_NAMES}, or a bundled specification: "
            f"{', '.join(bundled_names())}.",
        ),
    ],
    gpus: Annotated[
        int | None, _text(_HARDWARE, "--gpus", "Number of GPUs; default: those of this machine.")
    ] = None,
    nodes: Annotated[
        int, typer.Option("--nodes", help="Machines they are in.", rich_help_panel=_HARDWARE)
    ] = 1,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            help=f"{', '.join(one.name for one in GPUS.values())}; default: as in this machine, "
            f"else {MEASURED.name}.",
            rich_help_panel=_HARDWARE,
            show_default=False,
            autocompletion=completion(one.name for one in GPUS.values()),
        ),
    ] = None,
    gpu_memory: Annotated[
        float | None, _text(_HARDWARE, "--gpu-memory", "GiB of each GPU; default: as --gpu has.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float,
        typer.Option(
            "--gpu-memory-utilization",
            help="Share of a GPU's memory that may be used.",
            rich_help_panel=_HARDWARE,
        ),
    ] = EngineOptions.gpu_memory_utilization,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            help="Tokens of a request that must fit; default: as many as do.",
            rich_help_panel=_MODEL,
            show_default=False,
            parser=parse_count,
            metavar="NUMBER",
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            "--kv-cache-dtype",
            help=", ".join(KV_CACHE_DTYPES),
            rich_help_panel=_MODEL,
            autocompletion=completion(KV_CACHE_DTYPES),
        ),
    ] = "auto",
    index_cache_dtype: Annotated[
        str,
        typer.Option(
            "--index-cache-dtype",
            help="The same of MiniMax-M3's index keys.",
            rich_help_panel=_MODEL,
            autocompletion=completion(KV_CACHE_DTYPES),
        ),
    ] = "auto",
    quantization: Annotated[
        str | None, _text(_MODEL, "--quantization", "As for `negamax serve`.")
    ] = None,
    revision: Annotated[
        str | None, _text(_MODEL, "--revision", "Branch, tag or commit of a hub model.")
    ] = None,
    concurrency: Annotated[
        str,
        typer.Option(
            "--concurrency",
            help="Requests at a time, one number or several. The least decides what is best for "
            "latency, the largest what is best for throughput.",
            rich_help_panel=_LOAD,
        ),
    ] = "1,16,64,100",
    input_len: Annotated[
        int | None,
        typer.Option(
            "--input-len",
            help="Tokens of a prompt; default: 1000, or as many as fit.",
            rich_help_panel=_LOAD,
            min=1,
            max=MAX_COUNT,
        ),
    ] = None,
    output_len: Annotated[
        int | None,
        typer.Option(
            "--output-len",
            help="Tokens of an answer; default: 1000, or as many as fit.",
            rich_help_panel=_LOAD,
            min=1,
            max=MAX_COUNT,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Exit code 0: something fits and runs; 1: nothing does."""
    hardware = _hardware(gpus, nodes, gpu, gpu_memory, gpu_memory_utilization)
    counts = sorted(parse_counts(concurrency, flag="--concurrency"))
    engine = EngineOptions(
        model=model,
        revision=revision,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        index_cache_dtype=index_cache_dtype,
        max_model_len=max_model_len,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    spec, ranks = _model(engine)
    lengths = _lengths(input_len, output_len, engine, spec)
    workloads = [Workload(count, *lengths) for count in counts]
    plan = make_plan(
        spec,
        hardware,
        workloads,
        kv_dtype=kv_cache_dtype,
        index_dtype=index_cache_dtype,
        max_model_len=engine.max_model_len,
        split_for=ranks,
    )
    if as_json:
        print(json.dumps(_document(plan, engine, spec), indent=2))
    else:
        _print(plan, engine, spec)
    raise typer.Exit(0 if plan.candidates else 1)


def _hardware(
    gpus: int | None, nodes: int, name: str | None, gib: float | None, utilization: float
) -> Hardware:
    here = visible_gpus() if gpus is None or (name is None and gib is None) else []
    if gpus is None and not here:
        raise ConfigError("--gpus is missing, and this machine has none", hint="give their number")
    gpus = len(here) if gpus is None else gpus
    if not 1 <= gpus <= _MOST_GPUS:
        raise ConfigError(f"--gpus is {gpus}; allowed: 1 to {_MOST_GPUS}")
    if nodes < 1 or gpus % nodes:
        raise ConfigError(
            f"--nodes is {nodes}; allowed: a number of machines that {gpus} GPUs are shared out "
            "over evenly"
        )
    gpu = find_gpu(name) if name is not None else here[0] if here else MEASURED
    if gib is not None:
        if not 1 <= gib <= 4096:
            raise ConfigError(f"--gpu-memory is {gib:g}; allowed: 1 to 4096 (GiB)")
        gpu = replace(gpu, memory=int(gib * GIB))
    return Hardware(gpu, gpus, nodes, utilization)


def _lengths(
    input_len: int | None, output_len: int | None, engine: EngineOptions, spec: ModelSpec
) -> tuple[int, int]:
    """Tokens of prompts and answers: those asked for, else as many as usual that fit. Errors:
    `ConfigError` for requests that the engine would refuse.
    """
    asked, max_length = engine.max_model_len, spec.max_position_embeddings
    context_length = asked or max_length
    left = context_length - output_len if output_len else context_length // 2
    prompt = input_len or max(1, min(Workload.input_len, left))
    answer = output_len or max(1, min(Workload.output_len, context_length - prompt))
    if prompt + answer > context_length:
        limit = f"--max-model-len is {asked}" if asked else f"the model's window is {max_length}"
        raise ConfigError(
            f"--input-len and --output-len make requests of {prompt + answer} tokens; {limit}",
            hint="lower them, or raise --max-model-len" if asked else "lower them",
        )
    return prompt, answer


def _model(engine: EngineOptions) -> tuple[ModelSpec, list[ParallelLayout]]:
    """The model, and the ranks that its files are split for; of a hub's no weights are fetched.
    Errors: `ConfigError`.
    """
    from negamax.engine.core.source import locate
    from negamax.quantization.names import quantized

    source = locate(replace(engine, load_format="synthetic", quantization=None))
    spec = source.spec
    quantization, _ = quantized(
        engine.quantization, spec.quantization, is_drawn=_is_bundled(engine.model)
    )
    return replace(spec, quantization=quantization), ranks_of(source.tokenizer_folder)


def _is_bundled(model: str) -> bool:
    return model.lower() in bundled_names() and not Path(model).exists()


# What to type


def commands(
    each: Candidate, engine: EngineOptions, spec: ModelSpec, hardware: Hardware
) -> list[str]:
    """What starts a server: one command, or one for each of its machines."""
    model, start = engine.model, []
    if _is_bundled(model):
        start = [] if engine.quantization is None else ["--load-format", "synthetic"]
        model = model if start else published_name(model)
    context_length = engine.max_model_len
    if context_length is None and each.context_length < spec.max_position_embeddings:
        context_length = each.context_length // 1024 * 1024
    sharding = "on" if each.shards_index else "off"
    words = ["negamax", "serve", model, *start, *each.topology.flags]
    nodes = each.topology.nodes(per_node=hardware.per_node)
    # of one machine; what is spread over several is started for each replica
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
        ("gpu-memory-utilization", hardware.utilization, EngineOptions.gpu_memory_utilization),
    ):
        words += [] if value == default else [f"--{name}", str(value)]
    if nodes == 1:
        return [shlex.join(words)]
    words += ["--nnodes", str(nodes), "--master-addr", FIRST_NODE, "--node-rank"]
    return [shlex.join([*words, str(node)]) for node in range(nodes)]


# The answer


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
        "best": {
            "latency": plan.fastest.topology.label if plan.fastest else None,
            "throughput": plan.busiest.topology.label if plan.busiest else None,
        },
        "topologies": [
            {
                "topology": each.topology.label,
                "gpus": each.topology.gpus,
                "replicas": each.topology.replicas,
                "options": dict(each.topology.sizes),
                "command": commands(each, engine, spec, hardware)[0],
                "commands": commands(each, engine, spec, hardware),
                "weight_bytes_per_gpu": each.memory.weights,
                "kv_bytes_per_token_per_gpu": each.memory.token,
                "kv_tokens": each.cache_tokens,
                "max_model_len": each.context_length,
                "first_token_ms": 1e3 * each.prompt_seconds,
                "prefill_tokens_per_second": each.prefill_rate,
                "loads": [
                    {
                        "concurrency": workload.concurrency,
                        "running": found.concurrency,
                        "tpot_ms": 1e3 * found.token_seconds,
                        "tokens_per_second": found.tokens_per_second,
                    }
                    for workload, found in zip(plan.workloads, each.predictions, strict=True)
                ],
            }
            for each in _ordered(plan)
        ],
        "refused": [
            {"topology": each.topology.label, "options": dict(each.topology.sizes),
             "reason": each.reason}
            for each in plan.refused
        ],
    }  # fmt: skip


def _ordered(plan: Plan) -> list[Candidate]:
    """The two best ones first."""
    best = [each for each in (plan.fastest, plan.busiest) if each is not None]
    return list(dict.fromkeys([*best, *plan.candidates]))


def _print(plan: Plan, engine: EngineOptions, spec: ModelSpec) -> None:
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
        if len(ordered) > _MOST_ROWS:
            console.print(
                f"\n{len(ordered) - _MOST_ROWS} slower ones are left out; --json has all."
            )
        console.print(
            "\nof each GPU: weights, KV cache per token; of all: tokens that the cache holds,\n"
            "longest request; first token of one prompt, tokens of prompts per second;\n"
            "by requests at a time: ms per token of each, tokens of answers per second\n"
            "(*: the cache holds fewer)"
        )
    for use, found in (("latency", plan.fastest), ("throughput", plan.busiest)):
        if found is not None:
            console.print(f"\nBest for {use}: {found.topology.label}")
            for line in commands(found, engine, spec, hardware):
                console.print(f"  {line}")
    for note in _notes(plan):
        console.print()
        print_line(note)
    if plan.refused:
        console.print("\nWhat does not run")
    for reason, labels in _by_reason(plan.refused).items():
        more = f" and {len(labels) - 4} more" if len(labels) > 5 else ""
        print_line(f"  {', '.join(labels[: 4 if more else 5])}{more}: {reason}", indent=4)


def _row(each: Candidate, plan: Plan) -> Iterator[str]:
    best = {"latency": plan.fastest, "throughput": plan.busiest}
    uses = [use for use, found in best.items() if found is each]
    yield f"{each.topology.label}\n{'both' if len(uses) == len(best) else ''.join(uses)}"
    yield f"{each.memory.weights / GIB:.1f} GiB\n{each.memory.token / 1024:.1f} KiB"
    yield f"{each.cache_tokens:,}\n{each.context_length:,}"
    yield f"{1e3 * each.prompt_seconds:.0f}\n{each.prefill_rate:,.0f}"
    for workload, found in zip(plan.workloads, each.predictions, strict=True):
        mark = "*" if found.concurrency < workload.concurrency else ""
        yield f"{1e3 * found.token_seconds:.2f}{mark}\n{found.tokens_per_second:,.0f}"


def _notes(plan: Plan) -> Iterator[str]:
    gpu, per_node = plan.hardware.gpu, plan.hardware.per_node
    if any(each and each.topology.ranks > per_node for each in (plan.fastest, plan.busiest)):
        yield f"A command for each machine; {FIRST_NODE} is an address of the first one."
    if not plan.candidates:
        yield "Nothing of it fits and runs."
    elif not gpu.platform.is_measured:
        yield f"Never measured on {gpu.name}: times are carried over from {MEASURED.name}."
    best = {each.topology for each in (plan.fastest, plan.busiest) if each is not None}
    if any(each.ranks > MEASURED_RANKS or each.tp < each.ranks or each.ep > 1 for each in best):
        yield f"Measured is tensor parallelism on up to {MEASURED_RANKS} GPUs, nothing else."


def _by_reason(refused: tuple[Refused, ...]) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for each in refused:
        found.setdefault(each.reason, []).append(each.topology.label)
    return found
