import pytest
import torch

from negamax import SamplingParams
from negamax.scheduler.step import NewRow, StepPlan
from negamax.worker import block_loader
from tests.copy_support import check_copies, make_plan, make_pool, read_block

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("piece", [1, 2, 100])
@pytest.mark.parametrize("most", [block_loader.MAX_PITCH, 0])
def test_copies_move_exactly_their_blocks(
    piece: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_loader, "MAX_PITCH", most)
    check_copies(CUDA, piece)


def test_stores_and_steps_wait_for_pending_loads() -> None:
    caches, pool = make_pool(6, CUDA)
    before = [read_block(caches, block) for block in range(9)]
    pool.run(make_plan(0, [0, 1], [3, 4], [], []))
    torch.cuda._sleep(10**9)  # a step of about half a second, after which the load starts
    assert pool.run(make_plan(1, [], [], [3, 4], [5, 6])).read() == -1
    pool.run(make_plan(2, [7, 8], [4, 3], [], []))  # overwrite the host blocks that are loaded
    row = NewRow(0, [1] * 12, 12, 8, [5, 6, 2], SamplingParams())
    pool.run(StepPlan(3, [row], [], [], [], [], [], []))
    assert [read_block(caches, block) for block in (5, 6)] == before[:2]
    assert pool.run(make_plan(4, [], [], [3, 4], [0, 1])).read() >= 1
    assert pool.await_copies(4, seconds=5)
    assert [read_block(caches, block) for block in (0, 1)] == before[8:6:-1]
    pool.close()
