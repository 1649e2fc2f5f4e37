"""Method "fp8", MiniMax's own: E4M3 matrices with one scale per 128 x 128 block, but for the
modules that the checkpoint lists.
"""

from __future__ import annotations

from negamax.config.quantization import QuantizationSpec
from negamax.kernels.formats import E4M3, E4M3_BLOCKS, E4M3_GROUP, PLAIN, TensorFormat
from negamax.quantization.scheme import Scheme, check_fields, is_within, module_list, refuse


def read(spec: QuantizationSpec) -> Scheme:
    """Errors: `ConfigError` for what is stored in another way."""
    check_fields(
        spec,
        {
            "fmt": (None, E4M3, "e4m3"),
            "activation_scheme": (None, "dynamic"),
            "scale_fmt": (None, "float"),
        },
    )
    block = spec.fields.get("weight_block_size")
    if not isinstance(block, list | tuple) or list(block) != [E4M3_GROUP, E4M3_GROUP]:
        expected = f"{[E4M3_GROUP, E4M3_GROUP]} (others are not supported yet)"
        refuse(spec, "weight_block_size", block, expected)
    unconverted = module_list(spec, "modules_to_not_convert")

    def format_of(module: str) -> TensorFormat:
        return PLAIN if is_within(module, unconverted) else E4M3_BLOCKS

    return Scheme((E4M3_BLOCKS,), format_of)
