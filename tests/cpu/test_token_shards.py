from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_support import GREEDY
from torch import Tensor

from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.kvcache.op import cache_rows, slots_of
from negamax.kernels.peers import PeerMemory
from negamax.layers.context_exchange import KeyExchange
from negamax.scheduler.step import NewRow, StepPlan, StepSize, bound_shard
from negamax.worker.batch import BatchLayout, build, build_batch_layout
from negamax.worker.request_state import RequestState
from negamax.worker.token_shards import AllTokens, ShardedRuns, TokenShard, shard_tokens

BLOCK = 4


class Meeting:
    """Simulate ranks of one process that gather in turn; the first round only records the sends."""

    def __init__(self, size: int) -> None:
        self.size, self.sent = size, dict[int, list[Tensor]]()
        self.is_first = True

    def of_all(self, run: Callable[[Rank], None]) -> None:
        """Call `run` as each rank in two rounds. Only the second round gives valid results."""
        for self.is_first in (True, False):
            for rank in range(self.size):
                run(Rank(self, rank))


class Rank:
    peers: PeerMemory | None = None

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size, self.count = meeting, rank, meeting.size, 0
        if meeting.is_first:
            meeting.sent[rank] = []

    def all_gather(self, tensor: Tensor, *, dim: int) -> Tensor:
        if self.meeting.is_first:
            self.meeting.sent[self.rank].append(tensor.clone())
            return tensor.repeat(self.size, *[1] * (tensor.dim() - 1))
        self.count += 1
        return torch.cat([self.meeting.sent[rank][self.count - 1] for rank in range(self.size)])

    def all_reduce(self, tensor: Tensor) -> Tensor:
        raise NotImplementedError

    reduce_scatter = all_reduce


def step(rows: list[tuple[int, int, int]]) -> tuple[BatchLayout, RequestState]:
    """Make a step. Each row has its prompt tokens, its computed tokens and its tokens to run."""
    longest = max(computed + count for _, computed, count in rows) + 1
    blocks = -(-longest // BLOCK)
    requests = RequestState(
        len(rows), longest, max_blocks=blocks, eos_token_ids=(), device=torch.device("cpu")
    )
    requests.set_padding_block(len(rows) * blocks)
    new = [
        NewRow(slot, list(range(100 * slot, 100 * slot + computed + count)), prompt, computed,
               list(range(slot * blocks, (slot + 1) * blocks)), GREEDY)
        for slot, (prompt, computed, count) in enumerate(rows)
    ]  # fmt: skip
    counts, zeros = [count for _, _, count in rows], [0] * len(rows)
    plan = StepPlan(1, new, [], [], list(range(len(rows))), counts, zeros, [True] * len(rows))
    requests.apply(plan)
    return build_batch_layout(plan, requests, generated_apart=True), requests


ROWS = st.lists(
    st.one_of(
        st.tuples(st.just(5), st.integers(5, 20), st.integers(1, 3)),  # generated tokens
        st.tuples(st.just(200), st.integers(0, 70), st.integers(1, 90)),  # chunks of prompts
        st.tuples(st.integers(3, 20), st.just(0), st.just(22)),  # rows of preempted sequences
    ),
    min_size=1,
    max_size=6,
)


@given(ROWS, st.integers(2, 4))
def test_every_token_returns_once_in_order(rows: list[tuple[int, int, int]], ranks: int) -> None:
    layout, requests = step(rows)
    all_ids, everything = build(layout, requests)
    meeting, lengths = Meeting(ranks), list[int]()

    def run(rank: Rank) -> None:
        share = shard_tokens(layout, requests, rank)
        token_ids, own = share.build()
        if isinstance(share, AllTokens):
            assert own.shared_tokens is None and token_ids.equal(all_ids)
            assert max(own.host_query_lens[own.num_decodes :], default=0) < 2 * ranks
            return
        lengths.append(len(token_ids))
        check_pieces(own)
        back = share.gather(torch.stack([token_ids, own.positions], dim=1))
        assert share.describe_all(own).positions.equal(everything.positions)
        if not meeting.is_first:
            assert back[:, 0].equal(all_ids) and back[:, 1].equal(everything.positions)
            assert own.is_share and own.most_tokens == max(lengths[:ranks])

    meeting.of_all(run)
    assert not lengths or (sum(lengths[:ranks]) == len(all_ids) and min(lengths) > 0)


@given(ROWS, st.integers(2, 4), st.booleans())
def test_shards_with_other_data_parallel_ranks(
    rows: list[tuple[int, int, int]], ranks: int, has_long_run: bool
) -> None:
    """Check that all tokens are sharded or none, and that no shard exceeds the planned size."""
    layout, requests = step(rows)
    all_ids, _ = build(layout, requests)
    num_tokens = len(all_ids)
    runs = sum(computed < prompt for prompt, computed, _ in rows)
    most = bound_shard(num_tokens, num_runs=runs, num_shards=ranks)
    largest = most + 2 if has_long_run else 0
    size = StepSize(num_tokens + 7, len(rows), 0, is_decode=False, largest_shard=largest)
    meeting, lengths = Meeting(ranks), list[int]()

    def run(rank: Rank) -> None:
        share = shard_tokens(layout, requests, rank, size=size)
        token_ids, own = share.build()
        assert own.is_share == has_long_run
        if not has_long_run:
            assert token_ids.equal(all_ids) and own.most_tokens == num_tokens + 7
            return
        assert own.most_tokens == most + 2 and own.shared_tokens is not None
        is_padding = own.num_actual_tokens is not None
        assert is_padding == (token_ids.tolist() == [0] and own.token_slots[0] == len(rows))
        lengths.append(0 if is_padding else len(token_ids))
        back = share.gather(token_ids[:, None])
        assert meeting.is_first or back[:, 0].equal(all_ids)

    meeting.of_all(run)
    if has_long_run:
        assert sum(lengths[:ranks]) == num_tokens and max(lengths) <= most <= num_tokens


def check_pieces(own: AttentionMetadata) -> None:
    for number, (first, stop) in enumerate(pairwise(own.query_starts.tolist())):
        end = own.host_seq_lens[number]
        assert own.positions[first:stop].tolist() == list(range(end - (stop - first), end))
        assert set(own.token_slots[first:stop].tolist()) == {int(own.block_table_indices[number])}
        assert number >= own.num_decodes or stop - first == 1


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("computed", [0, 5000])
def test_ranks_attend_to_as_much_as_others(ranks: int, computed: int) -> None:
    layout, requests = step([(9000, computed, 4001), (3, 7, 1), (3, 9, 1)])
    work = []
    for number in range(ranks):
        share = ShardedRuns(layout, requests, Rank(Meeting(ranks), number))
        work.append(int(share.build()[1].positions.sum()))
    assert max(work) < 1.01 * min(work)


def test_one_rank_has_all_tokens() -> None:
    layout, requests = step([(90, 0, 40)])
    share: TokenShard = shard_tokens(layout, requests, Rank(Meeting(1), 0))
    assert isinstance(share, AllTokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_caches_of_all_ranks_hold_every_token(dtype: torch.dtype) -> None:
    """Check caches of different heads and widths. Unwritten blocks must not change."""
    layout, requests = step([(90, 3, 41), (3, 7, 1), (60, 0, 5)])
    token_ids, everything = build(layout, requests)
    blocks = requests._padding_block + 1
    shapes = {"k": (2, 16), "index": (1, 8)}

    def empty() -> dict[str, Tensor]:
        return {
            name: torch.zeros(blocks, heads, BLOCK, width).to(dtype)
            for name, (heads, width) in shapes.items()
        }

    def place(tokens: AttentionMetadata) -> Tensor:
        return slots_of(tokens.token_tables, block_size=BLOCK)

    caches = [empty() for _ in range(3)]

    def write(cache: Tensor, ids: Tensor, slots: Tensor) -> None:
        rows = cache_rows(slots, kv_heads=cache.shape[1], block_size=BLOCK)
        values = (ids % 13).repeat_interleave(cache.shape[1])[:, None].expand(-1, cache.shape[3])
        flat = cache.view(torch.uint8).view(len(cache) * cache.shape[1] * BLOCK, -1)
        flat[rows] = values.to(dtype).contiguous().view(torch.uint8)

    def run(rank: Rank) -> None:
        ids, own = shard_tokens(layout, requests, rank).build()
        exchange = KeyExchange(own, block_size=BLOCK, heads=(1, 2))
        for cache in caches[rank.rank].values():
            cache.view(torch.uint8).zero_()
            write(cache, ids, place(own))
        exchange(list(caches[rank.rank].values()))

    Meeting(3).of_all(run)
    for name, expected in empty().items():
        write(expected, token_ids, place(everything))
        for rank in range(3):
            assert caches[rank][name][:-1].float().equal(expected[:-1].float())
