"""CUDA graphs' memory is counted in their own pool; the allocator's total may shrink meanwhile."""

import pytest
import torch

from negamax.worker.device import pool_bytes


def test_only_the_segments_of_the_pool_count(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [
        {"segment_pool_id": (0, 0), "total_size": 1 << 30},
        {"segment_pool_id": (0, 7), "total_size": 3 << 20},
        {"segment_pool_id": (0, 7), "total_size": 2 << 20},
        {"segment_pool_id": (0, 8), "total_size": 1 << 20},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert pool_bytes((0, 7)) == 5 << 20
    assert pool_bytes((0, 9)) == 0
