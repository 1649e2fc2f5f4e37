import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch

GIB = 2**30
START_SECONDS = 240.0
RANK_HEADER = "X-data-parallel-rank"
TEXTS = ["The cat sat on", "2 + 2 =", "Hello", "Once upon a time there was", "A", "x = [1, 2,"]


@contextmanager
def serving(*options: str, log_file: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "negamax", "serve", "nano", "--port", "0", *options]
    with log_file.open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            deadline = time.monotonic() + START_SECONDS
            while not (found := re.search(r"ready: (https?://\S+)/v1", log_file.read_text())):
                assert server.poll() is None and time.monotonic() < deadline, log_file.read_text()
                time.sleep(0.1)
            yield found[1]
        finally:
            server.terminate()


def call(url: str, body: Any = None, **headers: str) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers |= {"Content-Type": "application/json"}
    with urlopen(Request(url, data, headers), timeout=180) as answer:
        return json.load(answer)


def complete(url: str, prompt: str, *, rank: int) -> str:
    body = {"prompt": prompt, "temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    answer = call(f"{url}/v1/completions", body, **{RANK_HEADER: str(rank)})
    text: str = answer["choices"][0]["text"]
    return text


def used_memory() -> list[int]:
    pairs = [torch.cuda.mem_get_info(device) for device in range(2)]
    return [total - free for free, total in pairs]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_replicas_run_on_gpus_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="the server needs FastAPI")
    before = used_memory()
    options = ("--num-replicas", "2", "--device", "cuda", "--kv-cache-memory", "4GiB")
    with serving(*options, log_file=tmp_path / "log") as url:
        gained = [after - held for after, held in zip(used_memory(), before, strict=True)]
        if "PYTEST_XDIST_WORKER" not in os.environ:  # Parallel tests use the same GPUs.
            assert all(4 * GIB < each < 24 * GIB for each in gained), gained
        texts = [[complete(url, text, rank=rank) for text in TEXTS] for rank in range(2)]
        assert texts[0] == texts[1]
        assert call(f"{url}/server_info")["device"].startswith("cuda")
