"""Targets of `negamax convert --to`.

A target defines the quantization config that the conversion writes to config.json. The package
`quantization` reads the format of each module from this config. This module does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from negamax.base.errors import ConfigError
from negamax.config.quantization import QuantizationSpec
from negamax.formats.floats import E4M3, E4M3_FNUZ, E4M3_GROUP, MX_GROUP
from negamax.quantization.detect import detect
from negamax.quantization.scheme import Scheme

_HEAD_AND_ROUTER = ("lm_head", r"re:.*\.gate$")
# Attention modules stay in bf16, as in published 4-bit checkpoints.
_ATTENTION = r"re:.*\.self_attn\..*"


@dataclass(frozen=True)
class Target:
    """A conversion target.

    `error` is the relative error |W' - W| / |W| (Frobenius norm) of a matrix of normally
    distributed weights. `tests/cpu/test_convert.py` measures this error.
    """

    name: str
    summary: str
    error: float
    description: Mapping[str, Any] | None  # new `quantization_config`; None: unquantized

    @property
    def is_neuron(self) -> bool:
        """Whether the target has the files and tensor names of the Neuron SDK."""
        return self.description is not None and self.description["quant_method"] == "neuron_fp8"

    @property
    def limit(self) -> float:
        """Largest relative error of a correct conversion: 4 * `error`, because of outliers."""
        return 4 * self.error

    @property
    def quantization(self) -> QuantizationSpec | None:
        if self.description is None:
            return None
        return QuantizationSpec(str(self.description["quant_method"]), dict(self.description))

    def scheme(self) -> Scheme | None:
        """Return the format of each module, or None if no module is quantized."""
        return detect(self.quantization)


def _compressed(
    format: str, *, rounds_inputs: bool = False, with_attention: bool = True, **weights: Any
) -> dict[str, Any]:
    """Build a quantization config of compressed-tensors.

    With `rounds_inputs`, activations get a scale per token. Without `with_attention`, attention
    stays unquantized.
    """
    common = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": None,
        "observer": "minmax", "observer_kwargs": {}, "symmetric": True,
    }  # fmt: skip
    inputs = {**common, "dynamic": True, "observer": None}
    inputs |= {"num_bits": weights["num_bits"], "type": weights["type"], "strategy": "token"}
    group = {
        "input_activations": inputs if rounds_inputs else None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {**common, **weights},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [*_HEAD_AND_ROUTER, *(() if with_attention else (_ATTENTION,))],
        "kv_cache_scheme": None,
    }


_UNCONVERTED = ["gate", "e_score_correction_bias", "lm_head"]
_FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": E4M3,
    "activation_scheme": "dynamic",
    "weight_block_size": [E4M3_GROUP, E4M3_GROUP],
    "modules_to_not_convert": _UNCONVERTED,
}
_ALL = (
    Target("bf16", "unquantized bfloat16", 0.0017, None),
    Target(
        "fp8-block",
        "FP8 with 128 x 128 blocks, MiniMax's own format", 0.027, _FP8_BLOCKS,
    ),
    Target(
        "fp8-fnuz",
        "FP8 with 128 x 128 blocks in the values of MI300",
        0.027,
        {**_FP8_BLOCKS, "fmt": E4M3_FNUZ},
    ),
    Target(
        "fp8-channel",
        "FP8 with a scale per output row (compressed-tensors float-quantized)",
        0.027,
        _compressed(
            "float-quantized", rounds_inputs=True, num_bits=8, type="float", strategy="channel"
        ),
    ),
    Target(
        "int8",
        "int8 with a scale per output row, W8A8 (compressed-tensors int-quantized)",
        0.0082,
        _compressed(
            "int-quantized", rounds_inputs=True, num_bits=8, type="int", strategy="channel"
        ),
    ),
    Target(
        "int4",
        "experts in int4 with groups of 128, W4A16 (compressed-tensors pack-quantized)",
        0.111,
        _compressed(
            "pack-quantized", with_attention=False,
            num_bits=4, type="int", strategy="group", group_size=128,
        ),
    ),
    Target(
        "nvfp4",
        "experts in NVFP4, W4A16 (compressed-tensors nvfp4-pack-quantized)",
        0.095,
        _compressed(
            "nvfp4-pack-quantized", with_attention=False,
            num_bits=4, type="float", strategy="tensor_group", group_size=16,
        ),
    ),
    Target(
        "mxfp4",
        "experts in MXFP4, W4A16 (compressed-tensors mxfp4-pack-quantized)",
        0.1155,
        _compressed(
            "mxfp4-pack-quantized", with_attention=False,
            num_bits=4, type="float", strategy="group", group_size=32, scale_dtype="torch.uint8",
        ),
    ),
    Target(
        "mxfp8",
        "MXFP8, FP8 with a power of two for 32 columns, as MiniMax publishes M3",
        0.027,
        {
            "quant_method": "mxfp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [1, MX_GROUP],
            "ignored_layers": _UNCONVERTED,
        },
    ),
    Target(
        "fp8-neuron",
        "FP8 of Trainium, laid out as neuronx-distributed-inference preprocesses M2",
        0.027,
        {
            "quant_method": "neuron_fp8",
            "weight_block_size": [E4M3_GROUP, E4M3_GROUP],
            "modules_to_not_convert": ["embed_tokens", "lm_head", "norm", "router", "o_proj"],
        },
    ),
)  # fmt: skip
TARGETS = {target.name: target for target in _ALL}


def find_target(name: str) -> Target:
    if name not in TARGETS:
        raise ConfigError(f"--to is {name!r}; allowed: {', '.join(TARGETS)}")
    return TARGETS[name]
