"""Count the selections of each expert on a rank, and move experts between slots and ranks as plans
request.

All ranks enqueue moves between two steps, in the order of the plans. A step before a move uses the
old weights and expert map, and a step after the move uses the new weights and map. A move needs two
buffers and no other memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from negamax.base.errors import EngineDeadError
from negamax.kernels.moe.op import ExpertWeights
from negamax.layers.expert_dispatch import ExpertMap
from negamax.layers.moe import mixtures
from negamax.models.decoder import Decoder
from negamax.options.eplb import FIXED, MOVED
from negamax.parallel.context import ParallelContext
from negamax.scheduler.step import ExpertMove, ExpertStep
from negamax.worker.config import WorkerConfig
from negamax.worker.device import HostTensor

_ALIGNMENT = 256  # alignment in bytes of an expert's tensors in a buffer


class ExpertRecorder:
    """Counts the selections of each expert."""

    def __init__(self, model: Decoder, context: ParallelContext, device: torch.device) -> None:
        """Start counting. Create the recorder before any step is captured."""
        layout, num_layers = context.layout, model.spec.num_layers
        sizes = model.spec.expert_sizes()
        assert sizes is not None, "the model has no experts"
        self._num_experts, self._world = sizes[0], context.world
        # selections by layer and expert; 0 for layers of other stages; last column: shared expert
        shape = (num_layers, self._num_experts + 1)
        self._counts = torch.zeros(shape, dtype=torch.int64, device=device)
        self._mixtures = {
            number: moe
            for number, layer in zip(layout.layers(num_layers), model.layers, strict=True)
            for moe in mixtures([layer])
        }
        self._tables = {number: list(moe.table) for number, moe in self._mixtures.items()}
        self._maps, most = {}, min(layout.ep, 1 + layout.redundant_experts)
        for number, moe in self._mixtures.items():
            counts = self._counts[number, : 1 + max(moe.table)]
            own = ExpertMap(moe.table, most_copies=most, device=device, counts=counts)
            self._maps[number] = own
            moe.use_map(own)
        # tensor-parallel ranks count the same tokens, so only their first rank's counts are summed
        self._counting_ranks = torch.arange(0, layout.world_size, layout.tp, device=device)
        self._gather()  # opens the connections between all ranks before requests arrive

    def reset(self) -> None:
        """Reset the counts to remove the selections of warmup steps."""
        self._counts.zero_()

    def counts(self) -> HostTensor:
        """Return selections [layers, experts] int64, summed over ranks. All ranks take part."""
        everyone = self._gather()[self._counting_ranks]
        return HostTensor(everyone.sum(0)[:, : self._num_experts].contiguous())

    def apply(self, step: ExpertStep) -> HostTensor | None:
        """Move experts before a step. Return selection counts if the plan requests them."""
        assert not step.moves, "this recorder does not move experts"
        return self.counts() if step.wants_counts else None

    def _gather(self) -> Tensor:
        return self._world.all_gather(self._counts.unsqueeze(0), dim=0)


class MovableExperts(ExpertRecorder):
    """Counts the selections of each expert, and moves experts between slots."""

    def __init__(self, model: Decoder, context: ParallelContext, device: torch.device) -> None:
        """Allocate all memory for moves, and open the connections between the ranks."""
        super().__init__(model, context, device)
        self._version = 0
        self._group, self._view = context.expert_group, context.layout.experts
        self._layouts = {
            number: _ExpertLayout(moe.expert_weights) for number, moe in self._mixtures.items()
        }
        num_bytes = max((packed.num_bytes for packed in self._layouts.values()), default=0)
        self._sent, self._received = torch.empty(2, num_bytes, dtype=torch.uint8, device=device)
        self._open()

    def apply(self, step: ExpertStep) -> HostTensor | None:
        """Move experts. Raises `EngineDeadError` if a plan with moves is lost or a rank is dead."""
        counts = self.counts() if step.wants_counts else None
        if not step.moves:
            return counts
        if step.version != self._version + 1:
            raise EngineDeadError(
                f"this rank received plan {step.version} of expert moves, but expects plan "
                f"{self._version + 1}"
            )
        self._version = step.version
        layers = dict.fromkeys(move.layer for move in step.moves)
        for layer in layers:
            if layer in self._mixtures:  # skip layers of other pipeline stages
                self._move(layer, [move for move in step.moves if move.layer == layer])
        return counts

    def _move(self, layer: int, moves: Sequence[ExpertMove]) -> None:
        """Carry out all `moves` of the layer, then update the layer's expert map."""
        moe, table, packed = self._mixtures[layer], self._tables[layer], self._layouts[layer]
        here, weights = moe.slots_here, moe.expert_weights
        sent = received = None
        arriving: ExpertMove | None = None
        for move in moves:
            if move.target in here:
                assert arriving is None, "a rank receives one expert at a time"
                arriving = move
                if move.source not in here:
                    source = self._peer(move.source // len(here))
                    received = self._received[: packed.num_bytes], source
            if move.source in here:
                is_local = move.target in here
                buffer = self._received if is_local else self._sent
                expert = weights.tensors(move.source - here.start)
                for view, tensor in zip(packed.views(buffer), expert, strict=True):
                    view.copy_(tensor)
                if not is_local:
                    assert sent is None, "a rank sends one expert at a time"
                    sent = buffer[: packed.num_bytes], self._peer(move.target // len(here))
        self._group.exchange(sent=sent, received=received)
        if arriving is not None:
            weights.replace(arriving.target - here.start, packed.views(self._received))
        moved = [table[move.source] for move in moves]
        for move, expert in zip(moves, moved, strict=True):
            table[move.target] = expert
        self._maps[layer].update(table)

    def _peer(self, ep_rank: int) -> int:
        """Return the rank with the slots of `ep_rank` and the same expert slices as this rank."""
        return ep_rank * self._view.tp + self._view.tp_rank

    def _open(self) -> None:
        """Exchange a message with every rank, to open the connections before requests arrive."""
        token = torch.zeros(1, dtype=torch.uint8, device=self._sent.device)
        size, own = self._view.ep, self._view.ep_rank
        for distance in range(1, size):
            to, source = (own + distance) % size, (own - distance) % size
            self._group.exchange(
                sent=(token, self._peer(to)), received=(token.clone(), self._peer(source))
            )


def load_recorder(
    config: WorkerConfig, model: Decoder, context: ParallelContext, device: torch.device
) -> ExpertRecorder | None:
    """Return the recorder that `config` requires, or None if selections are not counted."""
    if config.experts == FIXED or config.spec.expert_sizes() is None:
        return None
    return (MovableExperts if config.experts == MOVED else ExpertRecorder)(model, context, device)


class _ExpertLayout:
    """The byte range of each tensor of an expert in a buffer."""

    def __init__(self, weights: ExpertWeights) -> None:
        # for each tensor of an expert: first byte and end byte in the buffer, dtype, shape
        self._parts: list[tuple[int, int, torch.dtype, torch.Size]] = []
        self.num_bytes = 0
        for tensor in weights.tensors(0):
            begin, end = self.num_bytes, self.num_bytes + tensor.numel() * tensor.element_size()
            self._parts.append((begin, end, tensor.dtype, tensor.shape))
            self.num_bytes = -(-end // _ALIGNMENT) * _ALIGNMENT

    def views(self, buffer: Tensor) -> list[Tensor]:
        return [
            buffer[begin:end].view(dtype).view(shape) for begin, end, dtype, shape in self._parts
        ]
