"""Method "online": `--quantization` quantizes matrices while they are read.

In an unquantized checkpoint, all matrices except embedding, router and head are quantized. In an
MXFP8 checkpoint, MXFP8 matrices become FP8 blocks.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from negamax.config.quantization import QuantizationSpec
from negamax.formats.floats import E4M3_BLOCKS, PLAIN, mxfp4, nvfp4, use_rounded_activations
from negamax.formats.tensor_format import Rounding, TensorFormat
from negamax.quantization.compressed_tensors import INT8_CHANNEL, STRATEGIES, packed
from negamax.quantization.fp8 import MXFP8
from negamax.quantization.scheme import Scheme

# Name in `--quantization` -> format of the matrices in memory.
_FORMATS: Mapping[str, TensorFormat] = {
    "fp8": E4M3_BLOCKS,
    "fp8_per_block": E4M3_BLOCKS,
    "fp8_per_channel": use_rounded_activations(STRATEGIES["channel"]),
    "int4": packed(4, 128),
    "int8": use_rounded_activations(INT8_CHANNEL),
    "int8_per_channel_weight_only": INT8_CHANNEL,
    "mxfp4": mxfp4(),
    "mxfp8": MXFP8,
    "nvfp4": nvfp4(),
}
NAMES = tuple(_FORMATS)
SOURCE = "--quantization"  # `QuantizationSpec.source` of these formats
_PLAIN_MODULES = ("embed_tokens", "gate", "lm_head")


def spec(name: str) -> QuantizationSpec:
    """Return the description for quantizing an unquantized checkpoint to the format `name`."""
    return QuantizationSpec("online", {"format": name.replace("-", "_")}, source=SOURCE)


def make_head_spec(name: str) -> QuantizationSpec:
    return QuantizationSpec("online", {**spec(name).fields, "only": "lm_head"}, source=SOURCE)


def read(spec: QuantizationSpec) -> Scheme:
    """Return the scheme of a description that `spec` or `make_head_spec` returned."""
    stored = replace(_FORMATS[spec.fields["format"]], made_of=PLAIN)
    if only := spec.fields.get("only"):
        return Scheme((stored,), lambda module: stored if module == only else PLAIN)
    return Scheme.uniform(stored, _PLAIN_MODULES)


def has_mxfp8(scheme: Scheme) -> bool:
    return any(stored.name == MXFP8.name for stored in scheme.formats)


def make_blocks_spec(stored: QuantizationSpec) -> QuantizationSpec:
    """Return the description for loading the MXFP8 matrices of `stored` as FP8 blocks."""
    fields = {"method": stored.method, "fields": stored.fields, "source": stored.source}
    return QuantizationSpec("online", {"blocks_of": fields}, source=SOURCE)


def convert_to_blocks(scheme: Scheme) -> Scheme:
    """Return `scheme` with FP8 blocks of 128 x 128 instead of MXFP8.

    Scales stay powers of two. Let m be the largest magnitude in a block. Only values below 2^-13.8
    m change, by at most 2^-17.8 m, because half a step of E4M3's subnormals is 2^-10 and the scaled
    m is above 224. The RMS change of a matrix is therefore below 128 * 2^-17.8 = 5.6e-4 of its RMS.
    Rounding to MXFP8 changes a matrix by 2.6e-2 of its RMS.
    """
    formats = tuple(map(_blocks, scheme.formats))
    return Scheme(formats, lambda module: _blocks(scheme.format_of(module)))


@cache
def _blocks(stored: TensorFormat) -> TensorFormat:
    if stored.name != MXFP8.name:
        return stored
    return replace(E4M3_BLOCKS, made_of=stored, rounding=Rounding(to_powers=True))
