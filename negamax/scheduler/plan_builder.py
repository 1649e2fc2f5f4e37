"""Build a `StepPlan`. Most fields of the plan are lists with an entry for each row or block."""

from negamax.scheduler.chunk_length import ChunkLength
from negamax.scheduler.encoder_cache import EncoderCache, list_runs
from negamax.scheduler.sequence import Sequence
from negamax.scheduler.step import ImageRun, NewRow, StepPlan


class PlanBuilder:
    """Collects the rows of one plan: decodes, then chunks of one token, then longer chunks."""

    def __init__(
        self, step_id: int, budget: int, chunk_length: ChunkLength, encoder: EncoderCache
    ) -> None:
        self.step_id, self.encoder = step_id, encoder
        self.budget = budget  # number of tokens that the plan can still get
        self.chunk_length = chunk_length
        self.new_rows: list[NewRow] = []
        self.appended_slots: list[int] = []
        self.appended_blocks: list[int] = []
        self.sequences: list[Sequence] = []  # one sequence per entry of `slots`
        self.slots: list[int] = []
        self.drafts: dict[int, int] = {}  # row -> number of the row's draft tokens, if above 0
        self.chunks: list[tuple[int, bool, Sequence]] = []  # (length, samples, sequence)

    def append_block(self, sequence: Sequence) -> None:
        self.appended_slots.append(sequence.slot)
        self.appended_blocks.append(sequence.block_ids[-1])

    def add_chunk(self, sequence: Sequence) -> bool:
        """Add a chunk of the sequence's remaining tokens, as large as the budget and the encoder
        cache allow. Return True if the chunk samples a token, because no tokens remain.
        """
        computed, left = sequence.num_computed, sequence.num_total - sequence.num_computed
        count, room = self.chunk_length.fit(computed, left, self.budget)
        if sequence.request.images:
            ready = self.encoder.acquire(sequence, count, self.step_id)
            if ready < count:
                count = room = ready
            if not count:
                return False
        sequence.num_computed += count
        samples = sequence.num_computed == sequence.num_total
        sequence.num_total += samples
        self.budget -= room
        self.chunks.append((count, samples, sequence))
        return samples

    def extend_chunk(self, sequence: Sequence) -> None:
        """Extend the sequence's chunk in this plan, or add one if the sequence has no chunk."""
        earlier = [chunk for chunk in self.chunks if chunk[2] is sequence]
        num_chunks = len(self.chunks)
        self.add_chunk(sequence)
        if earlier and len(self.chunks) > num_chunks:
            self.chunks.remove(earlier[0])
            count, samples, _ = self.chunks.pop()
            self.chunks.append((earlier[0][0] + count, samples, sequence))

    def finish(self, *, has_constrained: bool, num_proposed: int) -> StepPlan:
        """Return the plan, and append the sequences of chunks to `sequences`, in row order."""
        num_scheduled = [1] * len(self.slots)
        needs_sampling = [True] * len(self.slots)
        images: list[ImageRun] = []
        self.chunks.sort(key=lambda chunk: chunk[0] > 1)  # stable sort: chunks of 1 token first
        for count, samples, sequence in self.chunks:
            if samples:
                sequence.num_proposed = num_proposed
            if sequence.request.images:
                stop = sequence.num_computed
                images += list_runs(sequence, stop - count, stop)
            self.sequences.append(sequence)
            self.slots.append(sequence.slot)
            num_scheduled.append(count)
            needs_sampling.append(samples)
        num_draft_tokens = [0] * len(self.slots)
        for row, num_drafts in self.drafts.items():
            num_draft_tokens[row] = num_drafts
            num_scheduled[row] += num_drafts
        grammar_rows: list[int] = []
        if has_constrained:
            grammar_rows = [
                row
                for row, of in enumerate(self.sequences)
                if of.is_constrained and needs_sampling[row]
            ]
        return StepPlan(
            self.step_id,
            self.new_rows,
            self.appended_slots,
            self.appended_blocks,
            self.slots,
            num_scheduled,
            num_draft_tokens,
            needs_sampling,
            grammar_rows,
            num_proposed,
            encodes=self.encoder.take_jobs(),
            images=images,
        )
