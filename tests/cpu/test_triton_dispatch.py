"""Dispatch and combine tokens in the interpreter: one rank runs, its memory holds others' words."""

import pytest
import torch
from torch import Tensor
from triton_support import Group, Ranks, words_of

from negamax.kernels.dispatch import triton as kernels
from negamax.kernels.dispatch.op import ExpertRanges

EXPERTS, TOP_K, WIDTH = 8, 3, 256
COLUMNS = (("weights", TOP_K), ("x", WIDTH // 2), ("scale", WIDTH // 128))  # name, number of words
WORDS = TOP_K + sum(words for _, words in COLUMNS)
NUM_TOKENS = {0: 3, 1: 0, 2: 4, 3: 2}  # rank -> number of its tokens
NUM_ROWS = 4


class Model:
    def __init__(self, world: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.world, count = world, EXPERTS // world
        self.experts = ExpertRanges(torch.arange(0, EXPERTS, count, dtype=torch.int32), count)
        self.ids, self.columns, self.made = [], [], []
        for rank in range(world):
            tokens = NUM_TOKENS[rank]
            ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
            ids = ids.to(torch.int32)
            if tokens > 1:
                ids[1] = -1  # Rows after the active ones have the id -1.
            self.ids.append(ids)
            weights = torch.rand(tokens, TOP_K, generator=generator)
            x = torch.randn(tokens, WIDTH, generator=generator).half()
            self.columns.append([weights, x, torch.rand(tokens, WIDTH // 128, generator=generator)])
            self.made.append(torch.randn(world * NUM_ROWS, 2, WIDTH, generator=generator).half())

    def held(self, ids: Tensor, rank: int) -> Tensor:
        first = int(self.experts.firsts[rank])
        return (ids.ge(first) & ids.lt(first + self.experts.count)).any(1)

    def all_ids(self) -> Tensor:
        found = torch.full((self.world, NUM_ROWS, TOP_K), -1, dtype=torch.int32)
        for rank, ids in enumerate(self.ids):
            found[rank, : len(ids)] = ids
        return found.flatten(0, 1)


@pytest.mark.parametrize(("world", "rank"), [(2, 0), (2, 1), (4, 2), (4, 1)])
def test_a_row_goes_to_its_chosen_ranks_and_their_sums_return(world: int, rank: int) -> None:
    to_experts = Ranks(world, rows=NUM_ROWS + 1, words=WORDS + 5)
    back = Ranks(world, rows=NUM_ROWS, words=WIDTH // 2)
    group = Group(back, rank, tokens=to_experts)
    for step in range(3):
        model = Model(world, seed=10 * step + world)
        for sender in set(range(world)) - {rank}:
            ids = model.ids[sender]
            for row in range(NUM_ROWS):
                is_token = row < len(ids)
                sent = ids[row] if is_token else torch.full((TOP_K,), -1, dtype=torch.int32)
                to_experts.arrive(rank, sender=sender, row=row, payload=sent)
                if is_token and model.held(ids[row : row + 1], rank):
                    columns = [words_of(column[row]) for column in model.columns[sender]]
                    to_experts.arrive(
                        rank, sender=sender, row=row, payload=torch.cat(columns), first_word=TOP_K
                    )
        shared = {"experts": model.experts, "group": group}
        all_ids, received = kernels.dispatch(
            model.ids[rank], model.columns[rank], num_rows=NUM_ROWS, **shared
        )
        assert torch.equal(all_ids, model.all_ids())
        for sender, ids in enumerate(model.ids):
            for row in model.held(ids, rank).nonzero().flatten().tolist():
                for column, sent in zip(received, model.columns[sender], strict=True):
                    assert torch.equal(column[sender * NUM_ROWS + row], sent[row])
        check_pushed(to_experts, model, rank, epoch=step + 1)

        for sender in set(range(world)) - {rank}:
            for row in model.held(model.ids[rank], sender).nonzero().flatten().tolist():
                their_sum = model.made[sender][rank * NUM_ROWS + row].float().sum(0).half()
                back.arrive(rank, sender=sender, row=row, payload=words_of(their_sum))
        sums = kernels.combine(model.made[rank], all_ids, **shared)
        for row in range(NUM_ROWS):
            total = torch.zeros(WIDTH)
            for other in range(world):
                if row < len(model.ids[rank]) and model.held(model.ids[rank][[row]], other):
                    total += model.made[other][rank * NUM_ROWS + row].float().sum(0).half().float()
            assert torch.equal(sums[row], total.half())
    assert to_experts.epochs[rank].tolist() == [3] * NUM_ROWS + [0]
    assert back.epochs[rank].tolist() == [3] * NUM_ROWS


def check_pushed(ranks: Ranks, model: Model, rank: int, *, epoch: int) -> None:
    for other, copy in enumerate(ranks.copies):
        for row, ids in enumerate(model.ids[rank]):
            arrived = copy[epoch & 1, row, rank]
            assert torch.equal(arrived[:TOP_K].to(torch.int32), ids)
            is_new = arrived[TOP_K:WORDS] >> 32 == epoch
            assert is_new.all() if model.held(ids[None], other) else not is_new.any()


def test_more_rows_than_the_region_has_go_through_the_group() -> None:
    class Doubling(Group):
        def all_gather(self, tensor: Tensor, *, dim: int) -> Tensor:
            return torch.cat((tensor, tensor), dim=dim)

        def reduce_scatter(self, tensor: Tensor) -> Tensor:
            return 2 * tensor[: len(tensor) // 2]

    group = Doubling(Ranks(2, rows=3, words=WIDTH // 2), 0, tokens=Ranks(2, rows=3, words=WORDS))
    model = Model(2, seed=1)
    ids, received = kernels.dispatch(
        model.ids[0], model.columns[0], experts=model.experts, group=group, num_rows=NUM_ROWS
    )
    assert ids[3].tolist() == [-1] * TOP_K and torch.equal(ids[:4], ids[4:])
    for column, sent in zip(received, model.columns[0], strict=True):
        assert torch.equal(column[:3], sent) and torch.equal(column[4:7], sent)
    sums = kernels.combine(model.made[0], ids, experts=model.experts, group=group)
    assert torch.equal(sums, 2 * model.made[0].sum(1)[:NUM_ROWS])
