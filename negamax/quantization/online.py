"""Method "online": a checkpoint whose matrices are quantised while they are read, as
`--quantization` asks. Of a plain one all are, but for embedding, router, norms and head; of another
those in MXFP8, which become FP8 in blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from negamax.config.quantization import QuantizationSpec
from negamax.formats.floats import (
    E4M3_BLOCKS,
    PLAIN,
    mxfp4,
    nvfp4,
    with_rounded_activations,
)
from negamax.formats.tensor_format import Rounding, TensorFormat
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
    """The description of a plain checkpoint that is quantised to what `name` says."""
    return QuantizationSpec("online", {"format": name.replace("-", "_")}, source=SOURCE)


def head_spec(name: str) -> QuantizationSpec:
    """Likewise, where the head alone is quantised."""
    return QuantizationSpec("online", {**spec(name).fields, "only": "lm_head"}, source=SOURCE)


def read(spec: QuantizationSpec) -> Scheme:
    """The scheme of a description that `spec` or `head_spec` made."""
    stored = replace(_FORMATS[spec.fields["format"]], made_of=PLAIN)
    if only := spec.fields.get("only"):
        return Scheme((stored,), lambda module: stored if module == only else PLAIN)
    return Scheme((stored,), lambda module: PLAIN if is_within(module, _PLAIN_MODULES) else stored)


def can_be_blocks(scheme: Scheme) -> bool:
    """Whether some matrices of a checkpoint are stored in MXFP8."""
    return any(map(_is_mxfp8, scheme.formats))


def blocks_spec(stored: QuantizationSpec) -> QuantizationSpec:
    """The description of a checkpoint that is described by `stored`, with its MXFP8 as blocks."""
    fields = {"method": stored.method, "fields": stored.fields, "source": stored.source}
    return QuantizationSpec("online", {"blocks_of": fields}, source=SOURCE)


def with_blocks(scheme: Scheme) -> Scheme:
    """`scheme`, with matrices in MXFP8 as FP8 in blocks of 128 x 128, whose scales stay powers of
    two: all values stay what they are but for those below 2^-14 of the block's largest.
    """

    def format_of(module: str) -> TensorFormat:
        return _blocks(scheme.format_of(module))

    return Scheme(tuple(map(_blocks, scheme.formats)), format_of)


@cache
def _blocks(stored: TensorFormat) -> TensorFormat:
    if not _is_mxfp8(stored):
        return stored
    return replace(E4M3_BLOCKS, made_of=stored, rounding=Rounding(to_powers=True))


def _is_mxfp8(stored: TensorFormat) -> bool:
    return stored.name == MXFP8.name
