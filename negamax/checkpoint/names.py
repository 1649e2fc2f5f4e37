"""One name map for the M2 family: from a tensor's name in a checkpoint to the model's slot, or to
the reason to skip it.

Slots carry the names of MiniMax's own checkpoints
(`model.layers.0.block_sparse_moe.experts.0.w1.weight`). Re-saved and converted checkpoints use a
few other spellings of the same tensors; they are listed here and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from dataclasses import dataclass

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
# (pattern, replacement), applied in order.
_ALIASES = (
    (re.compile(r"^(model\.layers\.\d+\.)mlp\."), r"\1block_sparse_moe."),
    (re.compile(r"(\.block_sparse_moe\.)gate\.(e_score_correction_bias)$"), r"\1\2"),
    (re.compile(r"(\.self_attn\.)(?:attn|k_proj|qkv_proj)\.k_scale$"), r"\1k_scale"),
    (re.compile(r"(\.self_attn\.)(?:attn|v_proj|qkv_proj)\.v_scale$"), r"\1v_scale"),
    (re.compile(r"(\.self_attn\.)([kv])_cache\.scale$"), r"\1\2_scale"),
)
_MTP = "multi-token prediction, not used"
# What only a layer of multi-token prediction has. Such layers may be numbered behind the model's
# own.
_MTP_OWN = re.compile(r"^model\.layers\.(\d+)\.(?:eh_proj|enorm|hnorm)\.")
_SKIPPED = (
    (re.compile(r"(^|[._])mtp([._]|$)"), _MTP),
    (
        re.compile(
            r"\.([qkv]_scale|kv_scale|[kv]_zero_point|[kv]_cache\.scale|kv_cache_(scale|offset)|q\.scale)$"
        ),
        "KV-cache scale that this model has no use for",
    ),
    (re.compile(r"\.rotary_emb\.inv_freq$"), "rotary frequencies, computed from config.json"),
)


@dataclass(frozen=True)
class Placement:
    """Where a checkpoint tensor goes: the slot that it fills, or, with a `skip_reason` and no such
    slot, nowhere.
    """

    slot: str
    skip_reason: str | None = None


def mtp_layers(names: Iterable[str]) -> frozenset[int]:
    """The numbers of the layers that hold tensors of multi-token prediction, by those tensors' own
    names.
    """
    return frozenset(int(match[1]) for match in map(_MTP_OWN.match, names) if match)


def place(name: str, *, num_layers: int, mtp: Set[int] = frozenset()) -> Placement:
    """The place of checkpoint tensor `name` in a model of `num_layers` layers. Whether the slot
    exists is for the caller.

    Of the layers `mtp` (see `mtp_layers`), those behind the model's own are skipped.
    """
    slot = name
    for pattern, replacement in _ALIASES:
        slot = pattern.sub(replacement, slot)
    for pattern, reason in _SKIPPED:
        if pattern.search(name):
            return Placement(slot, skip_reason=reason)
    layer = layer_of(slot)
    if layer is not None and layer >= num_layers and layer in mtp:
        return Placement(slot, skip_reason=_MTP)
    return Placement(slot)


def layer_of(slot: str) -> int | None:
    """The layer number in a slot's name, or None for a tensor outside the layers."""
    match = _LAYER.match(slot)
    return int(match[1]) if match else None
