"""Method "mxfp8", MiniMax's own for M3: E4M3 matrices with a power of two for 32 columns, but for
the modules that the checkpoint lists.

Activations stay in the compute dtype, where the method would round them to MXFP8, too.
"""

from __future__ import annotations

from negamax.config.quantization import QuantizationSpec
from negamax.formats.floats import E4M3, MX_GROUP, PLAIN, mxfp8
from negamax.quantization.scheme import Scheme, check_fields, is_within, module_list

MXFP8 = mxfp8(scale_name="weight_scale_inv")


def read(spec: QuantizationSpec) -> Scheme:
    """Errors: `ConfigError` for what is stored in another way."""
    check_fields(
        spec,
        {
            "weight_block_size": (None, [1, MX_GROUP]),
            "fmt": (None, E4M3, "e4m3"),
            "activation_scheme": (None, "dynamic"),
            "scale_fmt": (None, "ue8m0"),
            "kv_cache_quant_algo": (None,),
        },
        beside=("ignored_layers", "modules_to_not_convert", "quant_method"),
    )
    names = "ignored_layers", "modules_to_not_convert"
    ignored = tuple(module for name in names for module in module_list(spec, name))
    return Scheme((MXFP8,), lambda module: PLAIN if is_within(module, ignored) else MXFP8)
