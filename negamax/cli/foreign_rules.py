"""What other servers' options mean here where it depends on their value or on the line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GRAPHS = "whole steps run as CUDA graphs; --enforce-eager turns that off"
EXPERTS = "where experts lie is for --enable-expert-parallel to say; the answers are the same"
TRANSFER = "the KV cache stays in the server that computed it"
KERNELS = "kernels are chosen at start, for the GPU and the model"
SPECULATION = "it is part of --speculative-config"
EPLB = "it is part of --eplb-config, with --enable-eplb"
TOKENIZER = "the tokenizer is the checkpoint's"

# Names of other servers for a key of --eplb-config, and of --speculative-config.
EPLB_KEYS = {
    "num_redundant_experts": "ep-num-redundant-experts num-redundant-experts",
    "step_interval": "eplb-rebalance-num-iterations eplb-step-interval",
    "window_size": "eplb-window-size",
    "min_rebalancing_utilization_threshold": "eplb-min-rebalancing-utilization-threshold",
}
SPECULATION_KEYS = {
    "method": "speculative-algorithm spec-method",
    "model": "speculative-draft-model-path speculative-draft-model speculative-model spec-model",
    "revision": "speculative-draft-model-revision",
    "quantization": "speculative-draft-model-quantization",
    "num_speculative_tokens": "speculative-num-steps num-speculative-tokens spec-tokens",
    "num_draft_tokens": "speculative-num-draft-tokens",
    "prompt_lookup_min": "speculative-ngram-min-match-window-size",
    "prompt_lookup_max": "speculative-ngram-max-match-window-size",
}

_NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?")


@dataclass(frozen=True)
class Translation:
    """What becomes of an option: others in its place (name and value), a note that says why nothing
    does, or a refusal. `over`: options that mean something else beside it, with their new values.
    """

    instead: tuple[tuple[str, str], ...] = ()
    over: tuple[tuple[str, str], ...] = ()
    note: str | None = None
    refusal: str | None = None
    remedy: str | None = None


# From the value (a text, a list of them, what JSON holds, or a boolean) and the options of the
# line, as texts by parameter, those of other servers by their names.
Rule = Callable[[Any, Mapping[str, str]], Translation]


def compilation(value: Any, line: Mapping[str, str]) -> Translation:
    """What it says of CUDA graphs counts, level 0 is --enforce-eager; there is no compiler."""
    config = value if isinstance(value, dict) else {}
    instead = []
    if str(config.get("cudagraph_mode", "")).upper() in ("NONE", "0") or value == 0:
        instead.append(("--enforce-eager", ""))
    sizes = config.get("max_cudagraph_capture_size") or config.get("cudagraph_capture_sizes")
    if sizes:
        instead += capture_sizes(sizes, line).instead
    return Translation(tuple(instead), note=None if instead else GRAPHS)


def attention(value: Any, line: Mapping[str, str]) -> Translation:
    """What it says of the dtype of index keys is --index-cache-dtype."""
    dtype = value.get("indexer_kv_dtype") if isinstance(value, dict) else None
    if dtype is None:
        return Translation(note=KERNELS)
    return Translation((("--index-cache-dtype", str(dtype)),))


def capture_sizes(value: Any, line: Mapping[str, str]) -> Translation:
    """The largest size is --max-cudagraph-capture-size."""
    words = [str(size) for size in (value if isinstance(value, list) else [value])]
    sizes = [int(size) for word in words for size in re.findall(r"\d+", word)]
    if not sizes:
        return Translation(note=GRAPHS)
    return Translation((("--max-cudagraph-capture-size", str(max(sizes))),))


def graph_backend(value: Any, line: Mapping[str, str]) -> Translation:
    """`disabled` is --enforce-eager."""
    return (
        Translation((("--enforce-eager", ""),)) if value == "disabled" else Translation(note=GRAPHS)
    )


def no_decode_graphs(value: Any, line: Mapping[str, str]) -> Translation:
    """The same as --enforce-eager."""
    return Translation((("--enforce-eager", ""),)) if value else Translation()


def expert_parallel(value: Any, line: Mapping[str, str]) -> Translation:
    """The same as --enable-expert-parallel."""
    return Translation((("--enable-expert-parallel", ""),)) if value else Translation()


def attention_data_parallel(value: Any, line: Mapping[str, str]) -> Translation:
    """The tensor-parallel ranks are those of all data-parallel ranks together."""
    return _share_of_ranks("--data-parallel-size", value, line, others=_CONTEXT_SIZES)


def attention_context_parallel(value: Any, line: Mapping[str, str]) -> Translation:
    """The tensor-parallel ranks are those of all context-parallel ranks together."""
    with_data = (*_DATA_SIZES, *(("dp_size", "dp") if "enable_dp_attention" in line else ()))
    return _share_of_ranks("--prefill-context-parallel-size", value, line, others=with_data)


_DATA_SIZES = ("attn_dp_size", "attention_data_parallel_size")
_CONTEXT_SIZES = ("attn_cp_size", "attention_context_parallel_size")


def _share_of_ranks(
    name: str, value: Any, line: Mapping[str, str], *, others: Sequence[str]
) -> Translation:
    """So many groups, `name` here, of the ranks of --tensor-parallel-size, which are split by one
    of the options `others`, too.
    """
    text, given = str(value), line.get("tensor_parallel_size", "")
    if text in ("0", "1"):
        return Translation()
    size, ranks = (int(word) if word.isdigit() else 1 for word in (text, given))
    beside = max((_number(line.get(other, "1")) or 1 for other in others), default=1)
    if ranks % (size * beside):
        too = f" in {beside} groups" if beside > 1 else ""
        return Translation(
            refusal=f"it is to divide the number of ranks, which is {ranks}{too}",
            remedy=f"use --tensor-parallel-size {size * beside} for ranks of one GPU each",
        )
    own = (("--tensor-parallel-size", str(ranks // size // beside)),)
    return Translation(((name, text),), over=own)


def replicas(value: Any, line: Mapping[str, str]) -> Translation:
    """With --enable-dp-attention ranks that share the experts, else engines of their own."""
    if str(value) in ("0", "1"):
        return Translation()
    if "enable_dp_attention" in line:
        return attention_data_parallel(value, line)
    return Translation((("--num-replicas", str(value)),))


def local_ranks(value: Any, line: Mapping[str, str]) -> Translation:
    """Fewer than all of them: the others are on nodes of their own, with as many each."""
    local, total = _number(value), _number(line.get("data_parallel_size", "1"))
    if local == total or (value == "0" and "headless" not in line):
        return Translation()
    if local is None or total is None or local < 1 or total % local:
        return Translation(
            refusal=f"all nodes have as many of the {line.get('data_parallel_size', '1')} "
            f"data-parallel ranks",
            remedy="use a number that divides --data-parallel-size",
        )
    return Translation((("--nnodes", str(total // local)),))


def first_local_rank(value: Any, line: Mapping[str, str]) -> Translation:
    """Which node this is; without --data-parallel-size-local it has all ranks from there on."""
    first, total = _number(value), _number(line.get("data_parallel_size", "1"))
    own = line.get("data_parallel_size_local", line.get("dpl", ""))
    if first == 0:
        return Translation()
    local = _number(own) if own else (total or 0) - (first or 0)
    if not first or not total or not local or local < 1 or total % local or first % local:
        return Translation(
            refusal="it is no multiple of the data-parallel ranks of a node",
            remedy="use --nnodes and --node-rank instead",
        )
    return Translation((("--nnodes", str(total // local)), ("--node-rank", str(first // local))))


def meeting_point(value: Any, line: Mapping[str, str]) -> Translation:
    """HOST:PORT of node 0."""
    host, colon, port = str(value).removeprefix("tcp://").rpartition(":")
    if not colon or not port.isdigit():
        return Translation(refusal="it is to be HOST:PORT", remedy="use --master-addr HOST")
    return Translation((("--master-addr", host.strip("[]")), ("--master-port", port)))


def headless(value: Any, line: Mapping[str, str]) -> Translation:
    """A node without the API is every one but node 0."""
    others = ("node_rank", "data_parallel_start_rank", "dpr")
    if not value or any(line.get(name, "0") != "0" for name in others):
        return Translation()
    return Translation(
        refusal="node 0 has the API, and this is node 0",
        remedy="say with --node-rank which other node it is",
    )


def ray(value: Any, line: Mapping[str, str]) -> Translation:
    """The same as --distributed-executor-backend ray, or the value of it."""
    backend = "ray" if value is True else str(value)
    return Translation((("--distributed-executor-backend", backend),)) if value else Translation()


def renamed(name: str) -> Rule:
    """The rule of names for the option `name`."""

    def rule(value: Any, line: Mapping[str, str]) -> Translation:
        """The same value."""
        return Translation(((name, str(value)),))

    return rule


def _number(text: object) -> int | None:
    return int(str(text)) if str(text).isdigit() else None


def speculation(key: str) -> Rule:
    """The rule of names for `key` of --speculative-config."""

    def rule(value: Any, line: Mapping[str, str]) -> Translation:
        """The same value there; "none" and the like ask for nothing."""
        if str(value).lower() in ("", "none", "null", "auto", "unquant"):
            return Translation()
        known = int(value) if isinstance(value, str) and value.isdigit() else value
        return Translation((("--speculative-config", json.dumps({key: known})),))

    return rule


def eplb(key: str) -> Rule:
    """The rule of names for `key` of --eplb-config."""

    def rule(value: Any, line: Mapping[str, str]) -> Translation:
        """The same value there; alone it changes nothing, unless it asks for copies."""
        if str(value).lower() in ("", "none", "null", "0", "false"):
            return Translation()
        if "enable_eplb" not in line and key != "num_redundant_experts":
            return Translation(note=EPLB)
        known = json.loads(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
        return Translation((("--eplb-config", json.dumps({key: known})),))

    return rule


def kv_transfer(value: Any, line: Mapping[str, str]) -> Translation:
    """Without effect where kv_role is kv_both, else refused."""
    role = value.get("kv_role", "kv_both") if isinstance(value, dict) else ""
    if role == "kv_both":
        return Translation(note=TRANSFER)
    refusal = "prefill and decode run in one server"
    return Translation(refusal=refusal, remedy="start one server without it")


def tokenizer(value: Any, line: Mapping[str, str]) -> Translation:
    """Any other than MODEL is refused."""
    if str(value).rstrip("/") == line.get("model", "").rstrip("/"):
        return Translation()
    return Translation(
        refusal=TOKENIZER,
        remedy="leave it out, or put the files into a local folder with the checkpoint",
    )
