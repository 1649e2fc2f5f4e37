import pytest
import torch

from negamax.kernels.block_sparse.selection import (
    SparseShape,
    attended_tokens,
    best_keys,
    blocks_of_keys,
    choose,
    pages_of,
)


def select_by_counting(scores: list[float], position: int, shape: SparseShape) -> list[int]:
    local = position // shape.sparse_block_size
    last = range(max(0, local + 1 - shape.local_blocks), local + 1)
    forced = {*range(min(shape.init_blocks, local + 1)), *last}
    others = sorted(set(range(local + 1)) - forced, key=lambda block: (-scores[block], block))
    chosen = sorted([*forced, *others[: shape.topk_blocks - len(forced)]])
    return chosen + [-1] * (shape.topk_blocks - len(chosen))


@pytest.mark.parametrize(("topk", "init", "local"), [(1, 0, 1), (4, 0, 1), (4, 1, 2), (5, 3, 2)])
def test_selects_forced_blocks_and_the_best_of_the_others(topk: int, init: int, local: int) -> None:
    """Scores have few values, so that there are many ties; the lower block must win."""
    shape = SparseShape(2, 1, 64, 32, topk, init, local)
    generator = torch.Generator().manual_seed(topk)
    positions = torch.tensor([0, 31, 32, 100, 255, 256, 383, 70])
    scores = torch.randint(-3, 3, (len(positions), 2, 12), generator=generator).float()
    ids = choose(scores, positions, shape)
    shards = [  # The blocks are on three ranks, one of which holds only the first block.
        best_keys(scores[..., mine], mine.expand(len(positions), -1), positions, shape)
        for mine in map(torch.tensor, ([0], [1, 4, 5, 6, 11], [2, 3, 7, 8, 9, 10]))
    ]
    assert torch.equal(blocks_of_keys(torch.cat(shards, -1), positions, shape), ids)
    for token, position in enumerate(positions.tolist()):
        for head in range(2):
            wanted = select_by_counting(scores[token, head].tolist(), position, shape)
            assert ids[token, head].tolist() == wanted
    # blocks of each token, in cache blocks of two sparse blocks
    tables = torch.stack([torch.randperm(40, generator=generator)[:6] for _ in positions])
    pages = pages_of(ids, tables, shape)
    cache = torch.arange(40 * 2 * 64).view(40, 2, 64, 1)
    of_pages = cache.view(-1, 32)
    for token, position in enumerate(positions.tolist()):
        for head in range(2):
            seen, own = [], ids[token, head]
            for block in own[own >= 0].tolist():
                ats = range(block * 32, min(block * 32 + 32, position + 1))
                seen += [int(cache[tables[token, at // 64], head, at % 64, 0]) for at in ats]
            length = int(attended_tokens(positions[token], shape))
            assert of_pages[pages[token, head].long()].flatten()[:length].tolist() == seen


def test_selects_nothing_for_a_row_of_padding() -> None:
    shape = SparseShape(1, 1, 32, 32, 3)
    position = torch.tensor([-1])
    ids = choose(torch.zeros(1, 1, 4), position, shape)
    assert ids.tolist() == [[[-1, -1, -1]]] and attended_tokens(position, shape).tolist() == [0]
    assert pages_of(ids, torch.tensor([[7, 8, 9, 10]]), shape).tolist() == [[[0, 0, 0]]]
