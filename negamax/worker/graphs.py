"""Steps as CUDA graphs, one for each shape: how many tokens and sequences a step has, and how many
tokens of one sequence at most.

Launching sixty layers kernel by kernel takes a host several times as long as a GPU takes to run
them. A replay reads from a fixed buffer which slots run how many tokens, and everything else from
the persistent request state, so the host sends a few integers and one launch per step, and may do
so before the step before it has ended. A step is padded to the next captured shape of its kind:

    kind     shape          what is captured
    rows     (n, n, 1)      decodes: the whole step, from the rows' tokens to the sampled ones
    tokens   (T, seqs, T)   any mix of sequences: all layers; the attention's tiles of queries are
                            worked out on the device, and sampling stays outside
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from negamax.kernels.peers import Collective
from negamax.kernels.registry import KernelTable
from negamax.kernels.signatures import DRAW_LEADING, PICK
from negamax.layers.attention import KvCaches
from negamax.models.decoder import Decoder
from negamax.worker.batch import Column, StepColumns, model_inputs, place
from negamax.worker.device import Graph, GraphPool, Runtime, upload
from negamax.worker.request_state import RequestState


class StepShape(NamedTuple):
    """What a captured step has room for."""

    num_tokens: int
    num_seqs: int
    max_query_len: int  # tokens of one sequence

    @property
    def is_sampled(self) -> bool:
        """Whether the graph samples every token; else the layers alone are captured."""
        return self.max_query_len == 1


# A generated token in a step of any mix is one query of a whole tile and reads its keys alone:
# slower than decoding from here on.
LONGEST_DECODE = 8192  # tokens

ROWS, TOKENS = "rows", "tokens"
# (first, last, step) of the sizes worth a graph; the last of each kind goes on to the largest.
# Decodes: each up to 16, then in steps that leave at most an eighth of a step to padding.
# Others: in steps that leave at most a fifth of it.
_SIZES = {
    ROWS: ((1, 16, 1), (20, 64, 4), (72, 128, 8), (144, 256, 16), (288, None, 32)),
    TOKENS: ((128, 1024, 128), (1280, 2048, 256), (2560, 4096, 512), (5120, None, 1024)),
}


def capture_sizes(kind: str, largest: int) -> list[int]:
    """The sizes of `kind` worth a graph, up to `largest`."""
    sizes = {
        size
        for first, last, step in _SIZES[kind]
        for size in range(first, (last or largest) + 1, step)
        if size < largest
    }
    return sorted(sizes | {largest})


def capture_shapes(
    *, max_rows: int, max_tokens: int, max_num_seqs: int
) -> dict[str, list[StepShape]]:
    """By kind, the shapes of steps of up to `max_rows` decodes, or `max_tokens` tokens of up to
    `max_num_seqs` sequences.
    """
    return {
        ROWS: [StepShape(size, size, 1) for size in capture_sizes(ROWS, max_rows)],
        # (a step of one token is a decode)
        TOKENS: [
            StepShape(size, max_num_seqs, size)
            for size in capture_sizes(TOKENS, max(2, max_tokens))
        ],
    }


@dataclass(frozen=True)
class StepBuffers:
    """What every replay fills from the front. N is the largest number of tokens, R of sampled
    ones."""

    hidden: Tensor  # [N, hidden], of steps that are not sampled
    residuals: list[Tensor]  # of each captured layer [N, hidden]
    logits: Tensor  # [R, V of this rank] fp32
    token_ids: Tensor  # [R] int64


class StepGraphs:
    """Captured steps of the given shapes."""

    def __init__(
        self,
        shapes: dict[str, list[StepShape]],
        model: Decoder,
        kv: Sequence[KvCaches],
        requests: RequestState,
        *,
        kernels: KernelTable,
        group: Collective,
        runtime: Runtime,
        layers: Sequence[int] = (),
    ) -> None:
        """`layers`: those whose residual streams are captured too, as `Decoder.forward` does."""
        self.shapes, self._model, self._kv, self._requests = shapes, model, kv, requests
        self._pick, self._draw_leading = kernels[PICK].run, kernels[DRAW_LEADING].run
        self._group, self._runtime, self._layers = group, runtime, layers
        every = [shape for of_kind in shapes.values() for shape in of_kind]
        num_tokens = max(shape.num_tokens for shape in every)
        num_sampled = max(shape.num_tokens for shape in every if shape.is_sampled)
        device = requests.tokens.device
        # the `StepColumns` of a step, padded, and the number of its tokens
        self._columns = torch.zeros(
            max(sum(_widths(shape)) for shape in every), dtype=torch.int64, device=device
        )
        self._places = torch.zeros(
            max(shape.num_tokens + shape.num_seqs for shape in every),
            dtype=torch.int64,
            device=device,
        )
        # of decodes
        self._query_starts = torch.arange(num_sampled + 1, dtype=torch.int32, device=device)
        states = (num_tokens, model.spec.hidden_size)
        self.buffers = StepBuffers(
            hidden=torch.zeros(states, dtype=kernels.dtype, device=device),
            residuals=[torch.zeros(states, dtype=kernels.dtype, device=device) for _ in layers],
            logits=torch.zeros(
                num_sampled, len(model.vocab_range), dtype=torch.float32, device=device
            ),
            token_ids=torch.zeros(num_sampled, dtype=torch.int64, device=device),
        )
        # the step, and where it is sampled what `draw` replays
        self._graphs: dict[StepShape, list[Graph]] = {}
        # the step that was prepared last, and where its slots began
        self._latest: dict[StepShape, tuple[StepColumns, Column]] = {}

    def warmup(self, layers: int) -> None:
        """Launch what every shape launches, of the first `layers` alone."""
        for shapes in self.shapes.values():
            for shape in shapes:
                self._send(shape, StepColumns.of_decodes([]))
                for step in self._steps(shape, self._kv[:layers]):
                    step()

    def capture(self, kind: str, pool: GraphPool, progress: Callable[[int, int], None]) -> str:
        """Run and capture every shape of `kind`, the largest first, in the memory of `pool`; a line
        that says what that took.
        """
        started, before, shapes = time.monotonic(), pool.num_bytes(), self.shapes[kind]
        for number, shape in enumerate(reversed(shapes)):
            progress(number, len(shapes))
            self._send(shape, StepColumns.of_decodes([]))
            self._graphs[shape] = [pool.capture(step) for step in self._steps(shape, self._kv)]
        taken = (pool.num_bytes() - before) / 2**20
        return (
            f"{len(shapes)} up to {shapes[-1].num_tokens} {kind}: {taken:.0f} MiB, "
            f"{time.monotonic() - started:.1f} s"
        )

    def find(self, kind: str, num_tokens: int, num_seqs: int) -> StepShape | None:
        """The smallest captured shape of `kind` that holds so much; None: none does."""
        shapes = self.shapes[kind]
        found = bisect_left(shapes, num_tokens, key=lambda shape: shape.num_tokens)
        fits = found < len(shapes) and shapes[found].num_seqs >= num_seqs
        return shapes[found] if fits else None

    def prepare(self, shape: StepShape, columns: StepColumns) -> None:
        """Send the inputs of a step, to be replayed as `shape`."""
        starts = self._requests.num_computed_bound[columns.slots]
        self._latest[shape] = columns, starts
        self._send(shape, columns)

    def replay(self, shape: StepShape) -> StepBuffers:
        """Run the prepared step; the buffers hold its results until the next replay, those of
        padding behind them.
        """
        self._graphs[shape][0].replay()
        return self.buffers

    def residuals(self, num_tokens: int) -> list[Tensor]:
        """Of the first tokens of the step that was replayed, the streams of the layers that are
        captured.
        """
        return [residual[:num_tokens] for residual in self.buffers.residuals]

    def counts(self, shape: StepShape, num_rows: int) -> tuple[Tensor, Tensor]:
        """The slots of the prepared step's first rows, and how many tokens each runs. [num_rows]"""
        first = 2 * shape.num_tokens + shape.num_seqs
        return self._columns[:num_rows], self._columns[first : first + num_rows]

    def draw(self, shape: StepShape) -> None:
        """Choose again for those rows of the step that have a small top_k."""
        self._graphs[shape][1].replay()

    def replay_seconds(self, num_rows: int, *, repeats: int) -> float | None:
        """Device time of the latest decode of `num_rows` rows, replayed back to back: a step
        without any host. None: there was none.
        """
        shape = self.find(ROWS, num_rows, num_rows)
        if shape is None or shape not in self._latest:
            return None
        columns, starts = self._latest[shape]
        self._send(shape, columns)
        num_computed, graph = self._requests.num_computed, self._graphs[shape][0]
        before = num_computed.clone()
        slots, lengths = upload((columns.slots, starts), num_computed.device)
        num_computed[slots] = lengths
        graph.replay()
        began = self._runtime.record_event()
        for _ in range(repeats):
            graph.replay()
        ended = self._runtime.record_event()
        num_computed.copy_(before)
        if began is None or ended is None:
            return None
        ended.synchronize()
        milliseconds: float = began.elapsed_time(ended)
        return milliseconds / 1e3 / repeats

    def _send(self, shape: StepShape, columns: StepColumns) -> None:
        """Fill the inputs of `shape` with `columns` and padding."""
        slot, num_tokens = self._requests.padding_slot, len(columns.token_slots)
        values = zip(columns, (slot, slot, 0, 0, num_tokens), _widths(shape), strict=False)
        padded = [
            np.concatenate((column, np.full(width - len(column), value)))
            for column, value, width in values
        ]
        upload([*padded, np.array([num_tokens])], self._columns.device, out=self._columns)

    def _steps(self, shape: StepShape, kv: Sequence[KvCaches]) -> list[Callable[[], None]]:
        """What is captured for `shape`, each as a graph of its own."""
        run: list[Callable[[], None]] = [partial(self._run, shape, kv)]
        return [*run, partial(self._draw, shape)] if shape.is_sampled else run

    def _run(self, shape: StepShape, kv: Sequence[KvCaches]) -> None:
        """A step, as it is captured. Results are copied out, so that other graphs may use its
        memory.
        """
        requests, (num_tokens, num_seqs, _) = self._requests, shape
        *widths, _ = _widths(shape)
        columns, active = self._columns.split([sum(widths), len(self._columns) - sum(widths)])
        inputs = place(
            columns,
            requests,
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            out=self._places[: num_tokens + num_seqs],
        )
        is_decode = shape.max_query_len == 1
        token_ids, metadata = model_inputs(
            inputs,
            requests,
            query_starts=self._query_starts[: num_seqs + 1] if is_decode else inputs.query_starts,
            active=active[:1],
            num_decodes=num_seqs if is_decode else 0,
            host_seq_lens=(),
            host_query_lens=(),
        )
        hidden, residuals = self._model.forward(token_ids, metadata, kv, capture=self._layers)
        for buffer, residual in zip(self.buffers.residuals, residuals, strict=False):
            buffer[:num_tokens].copy_(residual)
        if not shape.is_sampled:
            self.buffers.hidden[:num_tokens].copy_(hidden)
            return
        token_ids = self._pick(
            self._model.local_logits(hidden, out=self.buffers.logits[:num_tokens]),
            first_id=self._model.vocab_range.start,
            temperature=requests.sampling[inputs.slots, 0],
            seeds=requests.seeds[inputs.slots],
            positions=inputs.seq_lens,
            group=self._group,
        )
        self._store(token_ids, inputs.slots, inputs.seq_lens)

    def _draw(self, shape: StepShape) -> None:
        """What `draw` replays, behind the step."""
        requests, num_rows = self._requests, shape.num_tokens
        slots, seq_lens = self._columns[:num_rows], self._places[num_rows : 2 * num_rows]
        token_ids = self._draw_leading(
            self.buffers.logits[:num_rows],
            first_id=self._model.vocab_range.start,
            filters=requests.sampling[slots],
            seeds=requests.seeds[slots],
            positions=seq_lens,
            otherwise=self.buffers.token_ids[:num_rows],
            group=self._group,
        )
        self._store(token_ids, slots, seq_lens)

    def _store(self, token_ids: Tensor, slots: Tensor, positions: Tensor) -> None:
        """The chosen tokens, to where the next step and the host find them."""
        tokens = self._requests.tokens
        tokens[slots, positions] = token_ids.clamp_min(0).to(tokens.dtype)
        self.buffers.token_ids[: len(slots)].copy_(token_ids)


def _widths(shape: StepShape) -> list[int]:
    """Of the `StepColumns`, and of the number of tokens behind them."""
    num_tokens, num_seqs, _ = shape
    return [num_tokens, num_seqs, num_tokens, num_seqs, num_seqs + 1, 1]
