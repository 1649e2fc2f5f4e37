"""Method "online": a plain checkpoint whose matrices are quantised while they are read, as
`--quantization` asks. Embedding, router, norms and head stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from negamax.config.quantization import QuantizationSpec
from negamax.kernels.float_formats import mxfp4, nvfp4
from negamax.kernels.formats import E4M3_BLOCKS, PLAIN, TensorFormat, with_rounded_activations
from negamax.quantization.compressed_tensors import INT8_CHANNEL, STRATEGIES, packed
from negamax.quantization.mxfp8 import MXFP8
from negamax.quantization.scheme import Scheme, is_within

# Names of `--quantization` -> how the matrices are held.
_FORMATS: Mapping[str, TensorFormat] = {
    "fp8": E4M3_BLOCKS,
    "fp8_per_block": E4M3_BLOCKS,
    "fp8_per_channel": with_rounded_activations(STRATEGIES["channel"]),
    "int4": packed(4, 128),
    "int8": with_rounded_activations(INT8_CHANNEL),
    "int8_per_channel_weight_only": INT8_CHANNEL,
    "mxfp4": mxfp4(),
    "mxfp8": MXFP8,
    "nvfp4": nvfp4(),
}
NAMES = tuple(_FORMATS)
SOURCE = "--quantization"  # of such a description; no file says so
_PLAIN_MODULES = ("embed_tokens", "gate", "lm_head")


def spec(name: str) -> QuantizationSpec:
    """The description of a checkpoint that is quantised to what `name` says."""
    return QuantizationSpec("online", {"format": name.replace("-", "_")}, source=SOURCE)


def read(spec: QuantizationSpec) -> Scheme:
    """The scheme of a description that `spec` made."""
    stored = replace(_FORMATS[spec.fields["format"]], is_online=True)
    return Scheme((stored,), lambda module: PLAIN if is_within(module, _PLAIN_MODULES) else stored)
