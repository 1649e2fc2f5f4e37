"""Method "mxfp8" (MiniMax-M3): E4M3 with a power of two per 32 columns. Listed modules stay plain.

Activations stay in the compute dtype; the method would round them to MXFP8.
"""

from __future__ import annotations

from negamax.config.quantization import QuantizationSpec
from negamax.formats.floats import E4M3, MX_GROUP, mxfp8
from negamax.quantization.scheme import Scheme, check_fields, read_modules

MXFP8 = mxfp8(scale_name="weight_scale_inv")


def read(spec: QuantizationSpec) -> Scheme:
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
    return Scheme.uniform(MXFP8, read_modules(spec, "ignored_layers", "modules_to_not_convert"))
