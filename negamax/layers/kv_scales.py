"""The checkpoint's scales of the keys and values of an FP8 cache."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.kernels.kvcache.op import FP8, KvCache
from negamax.layers.names import AttentionNames
from negamax.layers.weights import WeightSlot


class KvScales:
    """The scales of one layer's keys and values; 1.0 unless the checkpoint stores scales."""

    def __init__(self, names: AttentionNames) -> None:
        self._names, self.values, self.are_stored = names, (1.0, 1.0), False
        self._stored = torch.ones(2)  # the scales of keys and values, on the host
        self.slots = [
            WeightSlot(name, (), target=target, optional=True)
            for name, target in zip((names.k_scale, names.v_scale), self._stored, strict=True)
        ]

    def finish_loading(self) -> None:
        """Raises `CheckpointError` for an invalid scale, or if only one scale is stored."""
        written = [slot.name for slot in self.slots if slot.written]
        absent = [slot.name for slot in self.slots if not slot.written]
        if written and absent:
            raise CheckpointError(
                f"the checkpoint has {written[0]} but not {absent[0]}; store both scales or neither"
            )
        self.are_stored = bool(written)
        k_scale, v_scale = self._stored.tolist()
        if not (0 < k_scale < float("inf") and 0 < v_scale < float("inf")):
            raise CheckpointError(
                f"{self._names.k_scale} and {self._names.v_scale} are {k_scale} and {v_scale}; "
                "both scales must be finite and above 0"
            )
        self.values = k_scale, v_scale

    def scale(self, kv: Mapping[str, Tensor]) -> KvCache:
        """Return the caches `kv` with the scales of their keys and values."""
        k, v = kv["k"], kv["v"]
        return KvCache(k, v, self.values) if k.dtype == FP8 else KvCache(k, v)


def describe_kv_scales(layers: Iterable[object], dtype: torch.dtype) -> str:
    """Return a log text: whether a cache in `dtype` uses the checkpoint's KV scales."""
    parts = (part for layer in layers for part in vars(layer).values())
    found = (getattr(part, "kv_scales", None) for part in parts)
    scales = [own for own in found if isinstance(own, KvScales)]
    count = sum(own.are_stored for own in scales)
    if dtype != FP8:
        name = str(dtype).removeprefix("torch.")
        text = f"the checkpoint's FP8 KV scales ({count} layers) are not used with a {name} cache"
        return f"; {text} (--kv-cache-dtype fp8 uses them)" if count else ""
    if count == len(scales):
        return "; FP8 keys and values have the checkpoint's scales"
    text = f"{len(scales) - count} of {len(scales)} layers"
    return f"; FP8 keys and values of {text} have scale 1, because the checkpoint has none"
