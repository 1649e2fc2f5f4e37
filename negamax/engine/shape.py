"""Describe the serving shape: all settings that determine a deployment's results and speed.

Two benchmark results are comparable if their serving shapes are equal. Shapes are JSON objects.
"""

import hashlib
from typing import Any

import msgspec

from negamax import __version__
from negamax.options.engine import EngineOptions
from negamax.options.server import ServerOptions

SHAPE, HASH = "serving_shape", "hash"  # JSON keys of a serving shape and of its hash.


def make_shape(
    options: EngineOptions, of_ranks: dict[str, Any], *, model: str, revision: str | None
) -> dict[str, Any]:
    """Make a serving shape from the options and from `of_ranks`, the result of `worker.shape`."""
    parallel, drafts = options.parallel, options.speculation
    sizes = {
        "tensor": parallel.tensor_parallel_size,
        "expert": parallel.num_expert_ranks,
        "data": parallel.data_parallel_size,
        "pipeline": parallel.pipeline_parallel_size,
        "prefill_context": parallel.prefill_context_parallel_size,
        "decode_context": parallel.decode_context_parallel_size,
        "replicas": options.num_replicas,
    }
    return hash_shape(
        {
            "model": model,
            "revision": revision,
            "parallel": sizes,
            "drafts": msgspec.to_builtins(drafts) if drafts else None,
            "negamax": __version__,
            **of_ranks,
        }
    )


def hash_shape(fields: dict[str, Any]) -> dict[str, Any]:
    """Return `fields` as a serving shape, which begins with a short hash of the fields."""
    named = {key: value for key, value in fields.items() if key != HASH}
    encoded = msgspec.json.encode(named, order="deterministic")
    return {HASH: hashlib.sha256(encoded).hexdigest()[:12], **named}


def add_parsers(shape: dict[str, Any], options: ServerOptions) -> dict[str, Any]:
    """Add the names of a server's output parsers to a serving shape."""
    parsers = {"tool_call": options.tool_call_parser, "reasoning": options.reasoning_parser}
    return hash_shape({**shape, "parsers": parsers})
