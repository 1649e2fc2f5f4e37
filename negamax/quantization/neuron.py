"""Method "neuron_fp8": Trainium's FP8 (values up to 240) of neuronx-distributed-inference.

The matrices q, k and v have a scale per output row. Experts are stacked and transposed, with a
scale per 128 x 128 block or, in mode per_row, per output row. Only q, k, v and experts are
quantized. The checkpoints have no description, so `config/quantization.py` looks for the format's
tensor names in the index. `negamax convert` writes a description with this method.
"""

from negamax.config.quantization import QuantizationSpec
from negamax.formats.floats import E4M3, E4M3_GROUP
from negamax.formats.tensor_format import (
    COLUMNS,
    ONE,
    ROWS,
    Axis,
    Dim,
    Role,
    Rounding,
    StoredTensor,
    TensorFormat,
)
from negamax.quantization.scheme import Scheme, check_table, read_modules

LARGEST = 240.0


def _fp8(name: str, values: tuple[Dim, ...], *scale: Dim, rounds: bool = True) -> TensorFormat:
    tensors = (
        StoredTensor("weight", Role.VALUES, (E4M3,), values),
        StoredTensor("scale", Role.SCALE, ("float32",), scale),
    )
    return TensorFormat(name, E4M3, tensors, rounding=Rounding(LARGEST) if rounds else None)


_TRANSPOSED = COLUMNS, ROWS
_BLOCKS = Dim(Axis.COLUMNS, E4M3_GROUP), Dim(Axis.ROWS, E4M3_GROUP)
NEURON_ROWS = _fp8("fp8_e4m3_240_channel", (ROWS, COLUMNS), ROWS, ONE)
NEURON_BLOCKS = _fp8("fp8_e4m3_240_block_128x128_transposed", _TRANSPOSED, *_BLOCKS)
NEURON_EXPERT_ROWS = _fp8("fp8_e4m3_240_channel_transposed", _TRANSPOSED, ROWS, rounds=False)


def read(spec: QuantizationSpec) -> Scheme:
    check_table(spec, "neuron")
    plain = read_modules(spec, "modules_to_not_convert")
    experts = NEURON_EXPERT_ROWS if spec.fields.get("expert_scales") else NEURON_BLOCKS
    return Scheme.uniform(NEURON_ROWS, plain, experts=experts)
