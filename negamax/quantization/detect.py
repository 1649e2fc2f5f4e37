"""The table of quantization methods. A new method needs a file and an entry in `METHODS`."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from negamax.base.errors import ConfigError
from negamax.config.quantization import QuantizationSpec
from negamax.config.spellings import find_method
from negamax.quantization import (
    auto_round,
    awq,
    compressed_tensors,
    fp8,
    gptq,
    modelopt,
    modelslim,
    neuron,
    online,
    quark,
)
from negamax.quantization.scheme import Scheme

METHODS: dict[str, Callable[[QuantizationSpec], Scheme]] = {
    "auto-round": auto_round.read,
    "awq": awq.read,
    "compressed-tensors": compressed_tensors.read,
    "fp8": fp8.read,
    "gptq": gptq.read,
    "modelopt": modelopt.read,
    "modelslim": modelslim.read,
    "mxfp8": fp8.read_mxfp8,
    "neuron_fp8": neuron.read,
    "quark": quark.read,
}


def detect(spec: QuantizationSpec | None) -> Scheme | None:
    """Return a checkpoint's scheme; None if `spec` is None. Unknown methods raise `ConfigError`."""
    if spec is None:
        return None
    if (stored := spec.fields.get("blocks_of")) and spec.source == online.SOURCE:
        read_as_stored = detect(QuantizationSpec(**stored))
        assert read_as_stored is not None
        return online.convert_to_blocks(read_as_stored)
    read = online.read if spec.source == online.SOURCE else METHODS.get(find_method(spec.method))
    if read is None:
        raise ConfigError(
            f"the checkpoint is quantized by {spec.method!r} ({spec.source}); supported: "
            f"{', '.join(METHODS)}",
            hint="use MiniMax's FP8 checkpoint or a BF16 checkpoint",
        )
    scheme = read(spec)
    return replace(scheme, format_of=cache(scheme.format_of))
