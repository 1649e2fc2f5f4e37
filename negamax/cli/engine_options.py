"""The engine's options on the command line, one table for all commands; vLLM's names are shown, SGLang's accepted.

The machinery serves any table of options (`server_options` has another).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import typer

from negamax.base import log
from negamax.base.errors import ConfigError
from negamax.config.options import EngineOptions

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

MODEL, MEMORY, PARALLEL, LOGS = "Model", "Batching and memory", "Parallelism", "Logs"


def parse_bytes(text: str | int) -> int:
    """'1500000', '4GiB', '4g', '512M' as bytes; a default comes as the number it is."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([kmgt]?i?)b?", text.strip(), re.IGNORECASE)
    if match is None or match[2].lower() not in _UNITS:
        raise typer.BadParameter(f"{text[:60]!r} is not a size; allowed: bytes, or a number with K, M, G or Ki, Mi, Gi")
    return int(float(match[1]) * _UNITS[match[2].lower()])


@dataclass(frozen=True)
class Flag:
    """One field of an options class as a flag. `also` are other servers' names for it, accepted but not listed."""

    field: str
    panel: str
    help: str
    flags: tuple[str, ...] = ()  # default: the field's name
    also: tuple[str, ...] = ()
    turns_off: bool = False  # a switch that sets the field to False
    is_size: bool = False  # bytes, with units

    @property
    def names(self) -> tuple[str, ...]:
        return self.flags or (f"--{self.field.replace('_', '-')}",)


_TABLE = (
    Flag("revision", MODEL, "Branch, tag or commit of a hub model."),
    Flag("download_dir", MODEL, "Folder for downloads; default: the hub's cache."),
    Flag("dtype", MODEL, "auto, bfloat16, float16 or float32."),
    Flag("script", MODEL, "Answer by the rules of this TOML file, without weights; 'agents' is bundled."),
    Flag("load_format", MODEL, "auto, safetensors or synthetic (random weights)."),
    Flag("device", MODEL, "auto, cuda or cpu."),
    Flag("num_hidden_layers", MODEL, "Run fewer layers than the model has (synthetic weights)."),
    Flag("max_model_len", MODEL, "Tokens of prompt and output; default: the model's window.", also=("--context-length",)),
    Flag("seed", MODEL, "For requests that name none, and for synthetic weights.", also=("--random-seed",)),
    Flag("max_num_seqs", MEMORY, "Sequences in one step; default: 256 (CPU: 64).", also=("--max-running-requests",)),
    Flag("max_num_batched_tokens", MEMORY, "Tokens in one step; default: 8192 (CPU: 2048).", also=("--chunked-prefill-size",)),
    Flag("max_queued_requests", MEMORY, "Waiting requests; more are refused (429).", also=("--max-num-queued-reqs",)),
    Flag("max_queued_tokens", MEMORY, "Prompt tokens that may wait; default: 4 times what the KV cache holds."),
    Flag("block_size", MEMORY, "Tokens per KV block; default: 64 (CPU: 16).", also=("--page-size",)),
    Flag("kv_cache_memory", MEMORY, "KV cache per rank, such as 4GiB.", also=("--kv-cache-memory-bytes",), is_size=True),
    Flag("kv_cache_dtype", MEMORY, "auto (as the model), bfloat16, float16 or fp8 (e4m3, on a GPU)."),
    Flag("gpu_memory_utilization", MEMORY, "Share of a GPU's memory that may be used.", also=("--mem-fraction-static",)),
    Flag("num_kv_blocks", MEMORY, "KV blocks; overrides --kv-cache-memory.", also=("--num-gpu-blocks-override",)),
    Flag(
        "enable_prefix_caching",
        MEMORY,
        "Compute every prompt from its start.",
        flags=("--no-enable-prefix-caching",),
        also=("--disable-radix-cache",),
        turns_off=True,
    ),
    Flag(
        "enable_overlap",
        MEMORY,
        "Commit a step before the next is launched.",
        flags=("--no-async-scheduling",),
        also=("--disable-overlap-schedule",),
        turns_off=True,
    ),
    Flag("enforce_eager", MEMORY, "Run without CUDA graphs.", also=("--disable-cuda-graph",)),
    Flag(
        "max_cudagraph_capture_size",
        MEMORY,
        "Sequences of the largest captured decode step; default: --max-num-seqs.",
        also=("--cuda-graph-max-bs",),
    ),
    Flag("max_logprobs", MEMORY, "The most logprobs a request may ask for."),
    Flag(
        "tensor_parallel_size",
        PARALLEL,
        "Ranks that share each layer.",
        flags=("--tensor-parallel-size", "-tp"),
        also=("--tp-size", "--tp"),
    ),
    Flag("num_threads", PARALLEL, "CPU threads per rank; default: all cores, shared out."),
    Flag("log_level", LOGS, "debug, info, warning or error."),
    Flag("log_format", LOGS, "text, or json (an object per line)."),
    Flag(
        "show_progress",
        LOGS,
        "Do not show how far loading is.",
        flags=("--no-progress",),
        also=("--no-use-tqdm-on-load",),
        turns_off=True,
    ),
)
_NO_OPS = ("--enable-prefix-caching", "--async-scheduling")  # switches for what is on anyway
_ALSO = "also_"  # prefix of the hidden parameters

_MODEL_ARGUMENT = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="A local folder, a hub id, or 'nano', the embedded model.", show_default=False),
]
_MODEL_OPTION = Annotated[
    str | None, typer.Option("--model", help="The same as MODEL.", rich_help_panel=MODEL, show_default=False)
]
_MODEL_PATH = Annotated[str | None, typer.Option("--model-path", hidden=True)]


def with_engine_options(
    *, defaults: dict[str, Any] | None = None, needs_model: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command that takes `engine: EngineOptions`: it gets MODEL, --model and every option of the table.

    `defaults` replaces defaults of `EngineOptions` for this command; without `needs_model` the
    name may be missing, and is empty then.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        parameters = [
            parameter("model", None, _MODEL_ARGUMENT),
            *(given for name, given in own.parameters.items() if name != "engine"),
            parameter("model_option", None, _MODEL_OPTION),
            parameter("model_path", None, _MODEL_PATH),
            *flag_parameters(EngineOptions, _TABLE, defaults=defaults or {}),
            *(parameter(f"{_ALSO}{number}", False, _no_op(name)) for number, name in enumerate(_NO_OPS)),
        ]

        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            names = [values.pop(name) for name in ("model", "model_option", "model_path")]
            chosen = chosen_fields(_TABLE, {name: values.pop(name) for name in list(values) if name not in own.parameters})
            if chosen["log_level"] not in log.LEVELS:
                raise ConfigError(f"--log-level is {chosen['log_level']!r}; allowed: {', '.join(log.LEVELS)}")
            command(engine=EngineOptions(model=_one_model(names, needed=needs_model), **chosen), **values)

        wrapper.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return wrapper

    return decorate


def parameter(name: str, default: object, annotation: object) -> inspect.Parameter:
    """One option of a command, as typer reads it."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _no_op(name: str) -> object:
    return Annotated[bool, typer.Option(name, hidden=True)]


def flag_parameters(options: type, table: Sequence[Flag], *, defaults: dict[str, Any]) -> list[inspect.Parameter]:
    """The parameters that typer reads for `table`, fields of the dataclass `options`: one per listed flag, and a hidden one for
    its other names. `defaults` replaces those of the class."""
    types = get_type_hints(options)
    fields = {field.name: field.default for field in dataclasses.fields(options)} | defaults
    parameters = []
    for flag in table:
        kind, default = types[flag.field], False if flag.turns_off else fields[flag.field]
        if kind == tuple[str, ...]:
            kind, default = list[str] | None, None
        listed = typer.Option(
            *flag.names,
            help=flag.help,
            rich_help_panel=flag.panel,
            show_default=not flag.turns_off and default is not None,
            parser=parse_bytes if flag.is_size else None,
            metavar="SIZE" if flag.is_size else None,
        )
        parameters.append(parameter(flag.field, default, Annotated[kind, listed]))
        if flag.also:
            hidden = typer.Option(*flag.also, hidden=True, parser=parse_bytes if flag.is_size else None)
            parameters.append(parameter(_ALSO + flag.field, None, Annotated[kind | None, hidden]))
    return parameters


def chosen_fields(table: Sequence[Flag], values: dict[str, Any]) -> dict[str, Any]:
    """The fields of `table`, from the listed and the hidden parameters."""
    chosen: dict[str, Any] = {}
    for flag in table:
        value, other = values[flag.field], values.get(_ALSO + flag.field)
        if flag.turns_off:
            chosen[flag.field] = not (value or other)
        else:
            chosen[flag.field] = value if other is None else other
    return chosen


def _one_model(names: list[str | None], *, needed: bool) -> str:
    given = [name for name in names if name is not None]
    if not given and not needed:
        return ""
    if not given:
        raise ConfigError("MODEL is missing", hint="give a folder, a hub id, or 'nano', the embedded model")
    if len(set(given)) > 1:
        raise ConfigError(f"MODEL is {given[0]!r} and --model is {given[1]!r}", hint="give one of them")
    return given[0]
