"""A gated dense MLP, split by width over the attention group."""

from torch import Tensor

from negamax.formats.floats import E4M3_GROUPS
from negamax.kernels.activations import QuantizedActivations, SwiGlu
from negamax.kernels.mlp.op import SWIGLU
from negamax.layers.linear import ColumnParallel, ProjectionPart, RowParallel
from negamax.layers.names import MlpNames
from negamax.layers.weights import LayerSetup
from negamax.parallel.collectives import Partial
from negamax.parallel.layout import shard


class Mlp:
    """down(activation(gate, up)). Weights are dequantized if shards cut quantization groups."""

    def __init__(
        self,
        names: MlpNames,
        *,
        hidden_size: int,
        width: int,
        activation: SwiGlu,
        setup: LayerSetup,
    ) -> None:
        view = setup.context.layout.attention
        rows = shard(width, rank=view.rank, size=view.size, what="MLP intermediate size")
        self._swiglu, self._between = setup.kernels[SWIGLU].run, activation
        parts = [ProjectionPart(name, width, rows) for name in (names.gate, names.up)]
        self._gate_up = ColumnParallel(parts, hidden_size, setup=setup)
        self._down = RowParallel(names.down, (hidden_size, width), columns=rows, setup=setup)
        self.activation = self._gate_up.activation  # quantized format of x that the MLP accepts
        self._quantize = self._down.activation == E4M3_GROUPS
        self.slots = [*self._gate_up.slots, *self._down.slots]

    def finish_loading(self) -> None:
        self._gate_up.finish_loading()
        self._down.finish_loading()

    def __call__(self, x: Tensor | QuantizedActivations) -> Partial:
        """Map x [T, hidden] to [T, hidden]."""
        between = self._swiglu(self._gate_up(x), activation=self._between, quantize=self._quantize)
        return self._down(between)
