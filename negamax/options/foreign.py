"""Translate options of vLLM and SGLang that Negamax lacks. foreign.toml lists these options."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from negamax.base import env
from negamax.base.tables import read_table
from negamax.options.flags import Kind

_TABLES = read_table(__file__)
SERVER, BENCH = "options", "bench"  # Names of the tables in foreign.toml.
# `_NOTHING`: values, in lower case, with which a foreign option turns no feature on.
_NOTHING = ("", "none", "null", "{}", "[]", "false", "disabled", "auto")
_KINDS = {"switches": Kind.SWITCH, "values": Kind.VALUE, "lists": Kind.LIST, "json": Kind.JSON}
_NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?")
_DATA_SIZES = ("attn_dp_size", "attention_data_parallel_size")
_CONTEXT_SIZES = ("attn_cp_size", "attention_context_parallel_size")


@dataclass(frozen=True)
class Translation:
    """The translation of a foreign option to Negamax options, a note, or a refusal."""

    instead: tuple[tuple[str, str], ...] = ()  # (name, value) of equivalent Negamax options.
    over: tuple[tuple[str, str], ...] = ()  # (name, value) of options that override given options.
    note: str | None = None  # Why the option has no effect.
    refusal: str | None = None
    remedy: str | None = None


@dataclass(frozen=True)
class Foreign:
    """An option of another server. Comments in foreign.toml describe the fields."""

    kind: Kind
    reason: str = ""
    remedy: str | None = None
    unless: tuple[str, ...] = ()
    rule: "Rule | None" = None
    argument: str = ""
    about: str = ""
    off: str = ""

    def translate(self, value: Any, line: Mapping[str, str]) -> Translation:
        """Translate `value` of this option. `line`: the values of all given options, by name."""
        if self.rule is not None:
            return self.rule(self, value, line)
        if self.remedy is None:
            return Translation(note=self.off if self.off and value is False else self.reason)
        is_off = value is False or value in ({}, [])
        if is_off or (self.kind is not Kind.SWITCH and str(value).lower() in self.unless):
            return Translation()
        return Translation(refusal=self.reason, remedy=self.remedy)


Rule = Callable[[Foreign, Any, Mapping[str, str]], Translation]


@cache
def foreign_options(table: str = SERVER) -> Mapping[str, Foreign]:
    """Return other servers' options by name; `BENCH` selects options of their benchmarks."""
    found = {}
    for group in _TABLES[table]:
        fields = {name: value for name, value in group.items() if name not in _KINDS}
        fields["unless"] = (*_NOTHING, *group.get("unless", "").split())
        fields["rule"] = _RULES[group["rule"]] if "rule" in group else None
        for key, kind in _KINDS.items():
            entry = Foreign(kind, **fields)
            for name in group.get(key, "").split():
                found[name if name.startswith("-") else f"--{name}"] = entry
    return found


def own_value(option: str, value: str) -> str:
    """Return Negamax's name for another server's `value` of the option field `option`."""
    for own, names in _TABLES["values"].get(option, {}).items():
        if value in names.split():
            return str(own)
    return value


def explain_replacement(option: str, value: str) -> str | None:
    """Return why Negamax replaces the method `value`; None if it uses `value` itself."""
    own = own_value(option, value)
    reason = _TABLES["replaced"].get(option)
    return None if own == value or reason is None else f"{value} means {own}: {reason}"


# Rules


def _rename(entry: Foreign, value: Any, line: Mapping[str, str]) -> Translation:
    return Translation(((entry.argument, str(value)),))


def _override(entry: Foreign, value: Any, line: Mapping[str, str]) -> Translation:
    return Translation(over=((entry.argument, str(value)),))


def _switch(entry: Foreign, value: Any, line: Mapping[str, str]) -> Translation:
    """Set a Negamax option if the foreign switch is set or has the value `disabled`.

    `entry.argument` is a switch, or an option and its value with `=` between them.
    """
    if value is True or value == "disabled":
        name, _, own = entry.argument.partition("=")
        return Translation(((name, own),))
    return Translation(note=None if value is False else entry.reason)


def _compilation(entry: Foreign, value: Any, line: Mapping[str, str]) -> Translation:
    config = value if isinstance(value, dict) else {}
    instead = []
    if str(config.get("cudagraph_mode", "")).upper() in ("NONE", "0") or value == 0:
        instead.append(("--enforce-eager", ""))
    sizes = config.get("max_cudagraph_capture_size") or config.get("cudagraph_capture_sizes")
    if sizes:
        instead += _capture_sizes(entry, sizes, line).instead
    return Translation(tuple(instead), note=None if instead else entry.reason)


def _capture_sizes(entry: Foreign, value: Any, line: Mapping[str, str]) -> Translation:
    words = value if isinstance(value, list) else [value]
    sizes = [int(size) for word in words for size in re.findall(r"\d+", str(word))]
    if not sizes:
        return Translation(note=entry.reason)
    return Translation((("--max-cudagraph-capture-size", str(max(sizes))),))


def _member(entry: Foreign, value: Any, line: Mapping[str, str]) -> Translation:
    """Set an option to a member of the JSON object `value`. `entry.argument` is OPTION=MEMBER."""
    name, _, key = entry.argument.partition("=")
    own = value.get(key) if isinstance(value, dict) else None
    return Translation(((name, str(own)),)) if own else Translation(note=entry.reason)


def _attention_groups(entry: Foreign, value: Any, line: Mapping[str, str]) -> Translation:
    """Translate the number of attention groups into which SGLang splits --tensor-parallel-size."""
    others = _CONTEXT_SIZES
    if entry.argument == "--prefill-context-parallel-size":
        others = (*_DATA_SIZES, *(("dp_size", "dp") if "enable_dp_attention" in line else ()))
    text, given = str(value), line.get("tensor_parallel_size", "")
    if text in ("0", "1"):
        return Translation()
    size, ranks = _number(text) or 1, _number(given) or 1
    beside = max(_number(line.get(other, "1")) or 1 for other in others)
    if ranks % (size * beside):
        too = f" in {beside} groups" if beside > 1 else ""
        return Translation(
            refusal=f"the size must divide the number of ranks, which is {ranks}{too}",
            remedy=f"use --tensor-parallel-size {size * beside}, with one GPU per rank",
        )
    own = (("--tensor-parallel-size", str(ranks // size // beside)),)
    return Translation(((entry.argument, text),), over=own)


def _replicas(entry: Foreign, value: Any, line: Mapping[str, str]) -> Translation:
    if str(value) in ("0", "1"):
        return Translation()
    if "enable_dp_attention" in line:
        return _attention_groups(entry, value, line)
    return Translation((("--num-replicas", str(value)),))


def _local_ranks(entry: Foreign, value: Any, line: Mapping[str, str]) -> Translation:
    local, total = _number(value), _number(line.get("data_parallel_size", "1"))
    if local == total or (value == "0" and "headless" not in line):
        return Translation()
    if not local or not total or total % local:
        return Translation(
            refusal=f"{value} does not divide the {line.get('data_parallel_size', '1')} "
            f"data-parallel ranks",
            remedy="use a number that divides --data-parallel-size",
        )
    return Translation((("--nnodes", str(total // local)),))


def _first_local_rank(entry: Foreign, value: Any, line: Mapping[str, str]) -> Translation:
    first, total = _number(value), _number(line.get("data_parallel_size", "1"))
    own = line.get("data_parallel_size_local", line.get("dpl", ""))
    if first == 0:
        return Translation()
    local = _number(own) if own else (total or 0) - (first or 0)
    if not first or not total or not local or local < 1 or total % local or first % local:
        return Translation(
            refusal="the rank is not a multiple of the data-parallel ranks of a node",
            remedy="use --nnodes and --node-rank instead",
        )
    return Translation((("--nnodes", str(total // local)), ("--node-rank", str(first // local))))


def _meeting_point(entry: Foreign, value: Any, line: Mapping[str, str]) -> Translation:
    host, colon, port = str(value).removeprefix("tcp://").rpartition(":")
    if not colon or not port.isdigit():
        return Translation(refusal="the value must be HOST:PORT", remedy="use --master-addr HOST")
    return Translation((("--master-addr", host.strip("[]")), ("--master-port", port)))


def _headless(entry: Foreign, value: Any, line: Mapping[str, str]) -> Translation:
    others = ("node_rank", "data_parallel_start_rank", "dpr")
    if not value or any(line.get(name, "0") != "0" for name in others):
        return Translation()
    return Translation(
        refusal="this is node 0, which always runs the API server",
        remedy="set --node-rank to the number of another node",
    )


def _ray(entry: Foreign, value: Any, line: Mapping[str, str]) -> Translation:
    backend = "ray" if value is True else str(value)
    return Translation((("--distributed-executor-backend", backend),)) if value else Translation()


def _speculation(entry: Foreign, value: Any, line: Mapping[str, str]) -> Translation:
    if str(value).lower() in ("", "none", "null", "auto", "unquant"):
        return Translation()
    known = int(value) if isinstance(value, str) and value.isdigit() else value
    return Translation((("--speculative-config", json.dumps({entry.argument: known})),))


def _eplb(entry: Foreign, value: Any, line: Mapping[str, str]) -> Translation:
    if str(value).lower() in ("", "none", "null", "0", "false"):
        return Translation()
    if "enable_eplb" not in line and entry.argument != "num_redundant_experts":
        return Translation(note=entry.reason)
    known = json.loads(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
    return Translation((("--eplb-config", json.dumps({entry.argument: known})),))


def _host_cache(entry: Foreign, value: Any, line: Mapping[str, str]) -> Translation:
    """Convert SGLang's size of the host cache (GB per rank, or ratio to GPU cache) to an option."""
    if not value:
        return Translation()
    size = line.get("hicache_size", "0")
    if not _NUMBER.fullmatch(size) or not float(size):
        return Translation((("--kv-offloading-ratio", line.get("hicache_ratio", "2")),))
    sizes = ("tensor_parallel_size", "pipeline_parallel_size")
    tp, pp = (_number(line.get(name, "1")) or 1 for name in sizes)
    gib = float(size) * 1e9 * tp * pp / 2**30
    return Translation((("--kv-offloading-size", f"{gib:.6g}"),))


def _host_cache_size(entry: Foreign, value: Any, line: Mapping[str, str]) -> Translation:
    is_read = "enable_hierarchical_cache" in line or "enable_hicache" in line
    return Translation(note=None if is_read else entry.reason)


def _host_cache_files(entry: Foreign, value: Any, line: Mapping[str, str]) -> Translation:
    """Translate the backend "file" to SGLang's folder for cache files; ignore other backends."""
    if value != "file":
        return Translation(note=entry.reason)
    if _host_cache_size(entry, value, line).note:
        return Translation(note="the option has no effect without --enable-hierarchical-cache")
    folder = env.get("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR") or "/tmp/hicache"
    return Translation((("--kv-offloading-path", folder),))


def _disaggregation(entry: Foreign, value: Any, line: Mapping[str, str]) -> Translation:
    """Set a key of --kv-transfer-config from an option of SGLang."""
    mode, text = line.get("disaggregation_mode", "null"), str(value).lower()
    if mode.lower() in _NO_MODE:
        return Translation(note=None if text in _NO_MODE else entry.reason)
    known: dict[str, str | int] = {entry.argument: text}
    if entry.argument == "kv_role":
        if text not in _MODES:
            return Translation(refusal="the mode is unknown", remedy="use prefill, decode or null")
        known = {"kv_role": _MODES[text], "kv_port": 8998}
        if "disaggregation_bootstrap_port" in line:
            del known["kv_port"]
    elif entry.argument == "kv_port":
        known = {"kv_port": int(text) if text.isdigit() else text}
    elif text not in _LANES:
        return Translation(refusal="the backend is unknown", remedy="use nixl or tcp")
    else:
        known = {"kv_connector": _LANES[text]}
    return Translation((("--kv-transfer-config", json.dumps(known)),))


def _overrides(entry: Foreign, value: Any, line: Mapping[str, str]) -> Translation:
    """Refuse overrides of config.json that would change the model."""
    fields = value if isinstance(value, dict) else {}
    fields = {**fields, **(fields.get("text_config") or {})}
    fields.pop("text_config", None)
    scaling = [name for name in fields if name in ("rope_scaling", "rope_parameters")]
    scaled = fields if "factor" in fields else next((fields[name] for name in scaling), {})
    kind = scaled.get("rope_type", scaled.get("type")) if isinstance(scaled, dict) else None
    if kind not in (None, "default"):
        shown = "YaRN" if str(kind).lower() == "yarn" else f"rope scaling {str(kind)[:60]!r}"
        return Translation(
            refusal=f"{shown} is not supported",
            remedy="leave the option out; M3 has a context of 1,048,576 tokens without YaRN",
        )
    others = [name for name in fields if name not in _WITHOUT_EFFECT]
    if not others:
        return Translation(note=entry.reason if fields else None)
    refusal = f"config.json defines the model ({', '.join(map(str, others[:5]))})"
    return Translation(refusal=refusal, remedy=entry.remedy)


_NO_MODE = ("null", "none", "")
_MODES = {"prefill": "kv_producer", "decode": "kv_consumer"}
_LANES = {"nixl": "NixlConnector", "tcp": "TcpConnector"}
# fields of config.json with which other engines reuse a layer's selected blocks
_WITHOUT_EFFECT = ("use_index_cache", "index_topk_freq", "index_topk_pattern", "index_skip_offset")


def _tokenizer(entry: Foreign, value: Any, line: Mapping[str, str]) -> Translation:
    if str(value).rstrip("/") == line.get("model", "").rstrip("/"):
        return Translation()
    remedy = "leave the option out, or put the tokenizer's files into the checkpoint's folder"
    return Translation(refusal=entry.reason, remedy=remedy)


def _number(text: object) -> int | None:
    return int(str(text)) if str(text).isdigit() else None


_RULES: Mapping[str, Rule] = {
    rule.__name__.removeprefix("_"): rule
    for rule in (
        _override,
        *(_rename, _switch, _member, _compilation, _capture_sizes, _attention_groups),
        *(_replicas, _local_ranks, _first_local_rank, _meeting_point, _headless, _ray),
        *(_host_cache, _host_cache_size, _host_cache_files),
        *(_speculation, _eplb, _disaggregation, _tokenizer, _overrides),
    )
}
