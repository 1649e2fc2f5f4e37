"""Targets of `negamax convert --to`, which targets.toml lists.

A target defines a quantization config, which the conversion writes to config.json. The package
`quantization` reads each module's format from config.json. This module does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from negamax.base.errors import check_choice
from negamax.base.tables import read_table
from negamax.config.quantization import QuantizationSpec
from negamax.quantization.detect import detect
from negamax.quantization.scheme import Scheme

_HEAD_AND_ROUTER = ("lm_head", r"re:.*\.gate$")
# Attention modules stay in bf16, as in published 4-bit checkpoints.
_ATTENTION = r"re:.*\.self_attn\..*"


@dataclass(frozen=True)
class Target:
    name: str
    summary: str
    error: float  # |W' - W| / |W| (Frobenius norm) if normally distributed weights W become W'
    description: Mapping[str, Any] | None  # new `quantization_config`; None: unquantized

    @property
    def is_neuron(self) -> bool:
        """Whether the target has the files and tensor names of the Neuron SDK."""
        return self.description is not None and self.description["quant_method"] == "neuron_fp8"

    @property
    def limit(self) -> float:
        """Largest relative error of a correct conversion: 4 * `error`, to allow for outliers."""
        return 4 * self.error

    @property
    def quantization(self) -> QuantizationSpec | None:
        if self.description is None:
            return None
        return QuantizationSpec(str(self.description["quant_method"]), dict(self.description))

    def scheme(self) -> Scheme | None:
        """Return the format of each module, or None if no module is quantized."""
        return detect(self.quantization)


def build_compressed(
    weights: Mapping[str, Any],
    *,
    format: str,
    rounds_inputs: bool = False,
    with_attention: bool = True,
) -> dict[str, Any]:
    """Build a quantization config of compressed-tensors.

    With `rounds_inputs`, activations get a scale per token. If `with_attention` is False, attention
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


def _read_target(name: str, table: dict[str, Any]) -> Target:
    description = table.get("description")
    if "compressed" in table:
        description = build_compressed(table["weights"], **table["compressed"])
    return Target(name, table["summary"], table["error"], description)


TARGETS = {name: _read_target(name, table) for name, table in read_table(__file__).items()}


def find_target(name: str) -> Target:
    check_choice("--to", name, TARGETS)
    return TARGETS[name]
