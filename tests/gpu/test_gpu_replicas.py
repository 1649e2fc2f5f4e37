"""Replicas behind one server take GPUs of their own and say the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import serving
from tests.e2e.test_replicas import TEXTS, completion

GIB = 2**30


def used_memory() -> list[int]:
    found = []
    for device in range(2):
        free, total = torch.cuda.mem_get_info(device)
        found.append(total - free)
    return found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_replicas_run_on_gpus_of_their_own(tmp_path: Path) -> None:
    before = used_memory()
    options = ("--num-replicas", "2", "--device", "cuda", "--kv-cache-memory", "4GiB")
    with serving(*options, log_file=tmp_path / "log") as server:
        gained = [after - held for after, held in zip(used_memory(), before, strict=True)]
        assert all(4 * GIB < each < 24 * GIB for each in gained), gained
        texts = [
            [completion(server, text, rank=rank)["choices"][0]["text"] for text in TEXTS]
            for rank in range(2)
        ]
        assert texts[0] == texts[1]
        with server.http() as http:
            assert http.get("/server_info").json()["device"].startswith("cuda")
