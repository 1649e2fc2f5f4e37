"""Capture and replay steps as CUDA graphs, one graph for each size of steps (`StepShape`).

A GPU runs sixty layers several times faster than a host launches the layers kernel by kernel. A
replay reads slots and token counts from a fixed buffer, and all other inputs from the request
state. The host therefore sends a few integers and one launch per step, while the previous step
still runs. A step is padded to the next captured shape of its kind:

    kind     shape                    captured work
    rows     (n, n, 1)                decodes: the whole step, from input tokens to sampled tokens
                                      and new lengths
    drafts   (n * (k + 1), n, k + 1)  decodes with up to k draft tokens per row: the whole step with
                                      verification, for each draft length k that may be chosen
    tokens   (T, seqs, T)             any batch: all layers without sampling; the device computes
                                      the query tiles of attention

Graphs of the kinds `rows` and `drafts` include the proposer. If rows have fewer than k drafts, all
padding follows the tokens of the last row.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from negamax.kernels.attention.metadata import AttentionMetadata, DecodeRuns
from negamax.kernels.drafts.op import ADVANCE_ROWS, COUNT_ACCEPTED
from negamax.kernels.sampling.op import DRAW_LEADING, PICK, RowSampling
from negamax.kernels.steps.op import PLACE_TOKENS, STORE_TOKENS, ImageRows
from negamax.layers.attention import KvCaches
from negamax.worker.batch import Column, SampleInputs, StepColumns, StepInputs, metadata_of
from negamax.worker.device import Graph, GraphPool, upload
from negamax.worker.proposer import TokenStates
from negamax.worker.step_shapes import DRAFTS, ROWS, TOKENS, StepShape
from negamax.worker.verify import VerifiedRows, Verifier

if TYPE_CHECKING:
    from negamax.worker.runner import ModelRunner

# `AttentionMetadata` of a captured step, whose sequence lengths are only on the device
_NO_LENGTHS: dict[str, Any] = {"host_seq_lens": (), "host_query_lens": ()}


@dataclass(frozen=True)
class StepBuffers:
    """Outputs of a replay, in the first rows of each buffer, for up to N tokens and R samples."""

    hidden: Tensor  # [N, hidden] output of the layers; written only by steps that do not sample
    entering: Tensor | None  # [N, hidden] input from the previous stage; None: first stage
    residuals: list[Tensor]  # residual streams of the captured layers, [N, hidden] each
    logits: Tensor  # [R, vocabulary ids of this rank] fp32
    token_ids: Tensor  # [R] int64, sampled tokens
    num_accepted: Tensor  # [R] int64, number of accepted draft tokens of each row


class StepGraphs:
    """Captures and replays steps of the given shapes."""

    def __init__(self, shapes: dict[str, list[StepShape]], runner: ModelRunner) -> None:
        """Allocate the buffers. Each sampled step ends with the proposer of `runner`."""
        model, requests, kernels = runner.model, runner.requests, runner.kernels
        proposer, group = runner.proposer, runner.context.attention_group
        self.shapes, self._model, self._kv, self._requests = shapes, model, runner.caches, requests
        self._pick, self._draw_leading = kernels[PICK].run, kernels[DRAW_LEADING].run
        self._place_tokens = kernels[PLACE_TOKENS].run
        self._store_tokens = kernels[STORE_TOKENS].run
        self._shard: dict[str, Any] = {"first_id": model.vocab_range.start, "group": group}
        self._runtime, self._proposer = runner.runtime, proposer
        self._layers = proposer.capture if proposer else ()
        self._verifier = None
        if proposer is not None:
            count, advance = kernels[COUNT_ACCEPTED].run, kernels[ADVANCE_ROWS].run
            self._verifier = Verifier(proposer, requests, count, advance)
        # number of draft tokens -> shapes of captured decodes
        self._decodes: dict[int, list[StepShape]] = {}
        for shape in (*shapes[ROWS], *shapes.get(DRAFTS, ())):
            self._decodes.setdefault(shape.num_drafts, []).append(shape)
        every = [shape for of_kind in shapes.values() for shape in of_kind]
        num_tokens = max(shape.num_tokens for shape in every)
        num_sampled = max(shape.num_tokens for shape in every if shape.is_sampled)
        device = requests.tokens.device
        zeros = partial(torch.zeros, dtype=torch.int64, device=device)
        # this buffer contains the padded `StepColumns` of a step, then the step's number of tokens
        self._columns = zeros(max(sum(_widths(shape)) for shape in every))
        self._places = zeros(max(shape.num_tokens + shape.num_seqs for shape in every))
        most_words = max(2 * shape.num_seqs + 2 for shape in every)
        self._words = zeros(most_words, dtype=torch.int32)  # values of `_words_of`
        # for each token: the token id, and the sequence length up to this token (0: padding)
        self._token_ids, self._ends = zeros(2, num_tokens)
        # query starts of a step with one token per query
        self._query_starts = torch.arange(num_sampled + 1, dtype=torch.int32, device=device)
        self._images = None  # image row of each token of a step with prompts; None: no images
        if runner.encoder is not None:
            none = torch.full((num_tokens,), -1, dtype=torch.int32, device=device)
            self._images = ImageRows(none, runner.encoder.rows)
        self._has_images = False  # whether a token of the last step read an image row
        states = partial(zeros, num_tokens, model.spec.hidden_size, dtype=kernels.dtype)
        num_logits = num_sampled if model.is_last_stage else 0
        self.buffers = StepBuffers(
            hidden=states(),
            entering=None if model.is_first_stage else states(),
            residuals=[states() for _ in self._layers],
            logits=zeros(num_logits, len(model.vocab_range), dtype=torch.float32),
            token_ids=zeros(num_sampled),
            num_accepted=zeros(num_sampled),
        )
        # for each row of a step with drafts, `_lengths` is its length with the bonus token,
        # `_last_tokens` the index of its last accepted token, and `_drafts` its draft tokens
        self._lengths, self._last_tokens = zeros(2, num_sampled)
        self._drafts = zeros(num_sampled, requests.drafts.shape[1])
        # shape -> graph of its step; shapes that sample have a second graph for `draw` or `finish`
        self._graphs: dict[StepShape, list[Graph]] = {}
        # shape -> columns of the latest step, and computed tokens per slot before the step
        self._latest: dict[StepShape, tuple[StepColumns, Column]] = {}

    def warmup(self, layers: int) -> None:
        """Launch the kernels of every shape, in the first `layers` layers only."""
        for shapes in self.shapes.values():
            for shape in shapes:
                self._send(shape, StepColumns.of_decodes([], []))
                for step in self._steps(shape, self._kv[:layers]):
                    step()

    def capture(self, kind: str, pool: GraphPool, progress: Callable[[int, int], None]) -> str:
        """Run and capture every shape of `kind`, largest first. Return a line for the log."""
        started, before = time.monotonic(), pool.num_bytes()
        shapes = sorted(self.shapes[kind])
        for number, shape in enumerate(reversed(shapes)):
            progress(number, len(shapes))
            self._send(shape, StepColumns.of_decodes([], []))
            self._graphs[shape] = [pool.capture(step) for step in self._steps(shape, self._kv)]
        taken = (pool.num_bytes() - before) / 2**20
        return (
            f"{len(shapes)} up to {shapes[-1].num_tokens} {kind}: {taken:.0f} MiB, "
            f"{time.monotonic() - started:.1f} s"
        )

    def find(self, num_tokens: int, num_seqs: int) -> StepShape | None:
        """Return the smallest captured shape for a batch, or None if the batch is too large."""
        shapes = self.shapes[TOKENS]
        found = bisect_left(shapes, num_tokens, key=lambda shape: shape.num_tokens)
        fits = found < len(shapes) and shapes[found].num_seqs >= num_seqs
        return shapes[found] if fits else None

    def find_decodes(self, num_rows: int, num_drafts: int = 0) -> StepShape | None:
        """Return the smallest captured shape of decodes with up to `num_drafts` draft tokens."""
        fitting = [length for length in self._decodes if length >= num_drafts]
        if not fitting:
            return None
        shapes = self._decodes[min(fitting)]
        found = bisect_left(shapes, num_rows, key=lambda shape: shape.num_seqs)
        return shapes[found] if found < len(shapes) else None

    def entering(self, shape: StepShape) -> Tensor | None:
        """Return the buffer for the previous stage's output, or None on the first stage."""
        entering = self.buffers.entering
        return None if entering is None else entering[: shape.num_tokens]

    def prepare(self, shape: StepShape, columns: StepColumns) -> None:
        """Send the inputs of a step that is replayed as `shape`."""
        starts = self._requests.num_computed_bound[columns.slots]
        self._latest[shape] = columns, starts
        self._send(shape, columns)

    def place_images(self, rows: Column | None) -> None:
        """Set each token's image row in a prepared step. -1 and None mean no image."""
        if self._images is None or (rows is None and not self._has_images):
            return
        self._has_images, index = rows is not None, self._images.at
        index.fill_(-1)
        if rows is not None:
            index[: len(rows)] = upload((rows,), index.device)[0].int()

    def replay(self, shape: StepShape) -> StepBuffers:
        """Run the prepared step. Results end with padding, and are valid until the next replay."""
        self._graphs[shape][0].replay()
        return self.buffers

    def residuals(self, num_tokens: int) -> list[Tensor]:
        """Return the replayed step's captured residual streams of the first `num_tokens` tokens."""
        return [residual[:num_tokens] for residual in self.buffers.residuals]

    def sample_inputs(self, shape: StepShape, columns: StepColumns) -> SampleInputs:
        """Restore the drafts of a replayed step, and return inputs to sample the step again."""
        if shape.num_drafts:
            inputs, ran = self._inputs(shape), self._token_ids[: shape.num_tokens]
            self._requests.store(inputs.token_slots, inputs.positions, ran)
        num_samples = len(columns.token_slots)
        bounds = self._requests.num_computed_bound[columns.token_slots] + columns.token_offsets + 1
        return SampleInputs(
            columns.token_slots.tolist(),
            bounds.tolist(),
            self._columns[:num_samples],
            self._ends[:num_samples],
        )

    def draw(self, shape: StepShape) -> None:
        """Resample rows with a small top_k, which graphs with a proposer have already done."""
        if self._proposer is None:
            self._graphs[shape][1].replay()

    def drafts(self, shape: StepShape) -> Tensor:
        """Return the step's draft buffer [rows, drafts] int64, which `finish` reads again."""
        return self._drafts[: shape.num_seqs, : shape.num_drafts]

    def finish(self, shape: StepShape, token_ids: Tensor) -> None:
        """Replace the sampled tokens of a replay by `token_ids`, then verify and propose again."""
        self.buffers.token_ids[: len(token_ids)].copy_(token_ids)
        if self._proposer is not None:
            self._graphs[shape][1].replay()

    def replay_seconds(self, num_rows: int, *, repeats: int) -> float | None:
        """Return the device time of the latest decode of `num_rows` rows, or None if none ran."""
        shape = self.find_decodes(num_rows)
        if shape is None or shape not in self._latest:
            return None
        columns, starts = self._latest[shape]
        self._send(shape, columns)
        num_computed, graph = self._requests.num_computed, self._graphs[shape][0]
        before = num_computed.clone()
        slots, lengths = upload((columns.slots, starts), num_computed.device)

        def replay() -> None:
            num_computed[slots] = lengths  # restore what the previous replay changed
            graph.replay()

        seconds = self._runtime.seconds_of(replay, repeats=repeats)
        num_computed.copy_(before)
        return seconds

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
        """Return the functions to capture for `shape`, one graph each."""
        if not shape.is_sampled:
            return [partial(self._run_layers, shape, kv)]
        if not self._model.is_last_stage:
            return [partial(self._run_decodes, shape, kv)]
        again = self._draw if self._proposer is None else self._finish
        return [partial(self._run_decodes, shape, kv), partial(again, shape)]

    def _run_layers(self, shape: StepShape, kv: Sequence[KvCaches]) -> None:
        """Run the layers of a batch, and copy the results out of the graphs' shared memory."""
        seq_lens, query_starts, active = self._words_of(shape)
        inputs = replace(self._place(shape), seq_lens=seq_lens, query_starts=query_starts)
        metadata = metadata_of(inputs, self._requests, active=active, num_decodes=0, **_NO_LENGTHS)
        images = self._images
        if images is not None:
            images = ImageRows(images.at[: shape.num_tokens], images.rows)
        hidden = self._forward(shape, metadata, kv, images)
        self.buffers.hidden[: shape.num_tokens].copy_(hidden)

    def _run_decodes(self, shape: StepShape, kv: Sequence[KvCaches]) -> None:
        """Run a step of decodes, from input tokens to proposed drafts."""
        requests = self._requests
        if shape.num_drafts:
            slots = self._inputs(shape).slots
            self.drafts(shape).copy_(requests.drafts[slots, : shape.num_drafts])
        inputs, metadata = self._place(shape), self._decode_metadata(shape)
        hidden = self._forward(shape, metadata, kv)
        if not self._model.is_last_stage:
            self.buffers.hidden[: shape.num_tokens].copy_(hidden)
            requests.num_computed[inputs.slots] = inputs.seq_lens
            return
        logits = self._model.local_logits(hidden, out=self.buffers.logits[: shape.num_tokens])
        picked = self._pick(logits, self._get_sampling(shape), **self._shard)
        self._store(shape, picked if self._proposer is None else self._drawn(shape, picked))
        self._finish(shape, metadata)

    def _forward(
        self,
        shape: StepShape,
        metadata: AttentionMetadata,
        kv: Sequence[KvCaches],
        images: ImageRows | None = None,
    ) -> Tensor:
        hidden, _ = self._model.forward(
            self._token_ids[: shape.num_tokens], metadata, kv, capture=self._layers,
            out=self.residuals(shape.num_tokens), entering=self.entering(shape), images=images,
        )  # fmt: skip
        return hidden

    def _get_sampling(self, shape: StepShape) -> RowSampling:
        size = shape.num_tokens
        return self._requests.get_sampling(self._columns[:size], self._ends[:size])

    def _draw(self, shape: StepShape) -> None:
        """Resample rows with a small top_k, and store all tokens."""
        self._store(shape, self._drawn(shape, self.buffers.token_ids[: shape.num_tokens]))

    def _drawn(self, shape: StepShape, otherwise: Tensor) -> Tensor:
        """Return sampled tokens for rows with a small top_k, and `otherwise` for other rows."""
        logits = self.buffers.logits[: shape.num_tokens]
        token_ids: Tensor = self._draw_leading(
            logits, self._get_sampling(shape), otherwise=otherwise, **self._shard
        )
        return token_ids

    def _finish(self, shape: StepShape, metadata: AttentionMetadata | None = None) -> None:
        """Verify the step's drafts and propose new drafts. Repeated calls are allowed."""
        if self._verifier is None:
            return
        num_tokens, num_seqs = shape[:2]
        inputs, firsts = self._inputs(shape), self._inputs(shape).query_starts[:-1]
        rows = VerifiedRows(inputs.slots, self._counts(shape), inputs.seq_lens, firsts, firsts)
        outputs = self.buffers.num_accepted, self._lengths, self._last_tokens
        self._verifier(
            rows,
            self.buffers.token_ids[:num_tokens],
            self.drafts(shape) if shape.num_drafts else None,
            TokenStates(metadata or self._decode_metadata(shape), self.residuals(num_tokens)),
            num_proposed=shape.num_drafts,
            out=tuple(each[:num_seqs] for each in outputs),
        )

    def _place(self, shape: StepShape) -> StepInputs:
        """Compute the ids and positions of the step's tokens."""
        requests, (num_tokens, num_seqs) = self._requests, shape[:2]
        self._place_tokens(
            self._columns, requests.num_computed, requests.tokens,
            requests.drafts if shape.is_sampled and shape.num_drafts else None,
            padding_slot=requests.padding_slot,
            places=self._places[: num_tokens + num_seqs],
            token_ids=self._token_ids[:num_tokens],
            ends=self._ends[:num_tokens],
            words=self._words[: 2 * num_seqs + 2],
        )  # fmt: skip
        return self._inputs(shape)

    def _inputs(self, shape: StepShape) -> StepInputs:
        """Return the inputs that `_place` has computed."""
        return StepInputs.of(self._columns, self._places, shape.num_tokens, shape.num_seqs)

    def _words_of(self, shape: StepShape) -> tuple[Tensor, ...]:
        """Return int32 sequence lengths [S], query starts [S + 1] and number of real tokens [1]."""
        parts = shape.num_seqs, shape.num_seqs + 1, 1
        return self._words[: sum(parts)].split(parts)

    def _counts(self, shape: StepShape) -> Tensor:
        """Return the number of tokens of each row, [rows] int64."""
        first = 2 * shape.num_tokens + shape.num_seqs
        return self._columns[first : first + shape.num_seqs]

    def _decode_metadata(self, shape: StepShape) -> AttentionMetadata:
        """Describe each token as a decode, and the tokens of each row with drafts as a run."""
        inputs, num_tokens = self._inputs(shape), shape.num_tokens
        seq_lens, _, active = self._words_of(shape)
        runs = None
        if shape.num_drafts:
            runs = DecodeRuns(inputs.slots, seq_lens, inputs.query_starts)
            seq_lens = self._ends[:num_tokens].int()
        slots, starts = inputs.token_slots, self._query_starts[: num_tokens + 1]
        alone = StepInputs(slots, slots, inputs.positions, seq_lens, starts)
        return metadata_of(
            alone,
            self._requests,
            active=active,
            num_decodes=num_tokens,
            max_decode_run=shape.max_query_len,
            decode_runs=runs,
            **_NO_LENGTHS,
        )

    def _store(self, shape: StepShape, token_ids: Tensor) -> None:
        """Store the sampled tokens, and the new lengths of rows without drafts."""
        requests, num_tokens = self._requests, shape.num_tokens
        self._store_tokens(
            token_ids, self._columns[:num_tokens], self._ends[:num_tokens],
            tokens=requests.tokens,
            num_computed=None if shape.num_drafts else requests.num_computed,
            out=self.buffers.token_ids[:num_tokens],
        )  # fmt: skip


def _widths(shape: StepShape) -> list[int]:
    """Return the widths of all `StepColumns`, then the width of the token count, which is 1."""
    num_tokens, num_seqs = shape[:2]
    return [num_tokens, num_seqs, num_tokens, num_seqs, num_seqs + 1, 1]
