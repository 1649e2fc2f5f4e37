"""Thread pool that processes several matrices at the same time, one per thread."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
MOST_THREADS = 8  # a low limit, because each thread allocates several fp32 copies of a matrix


def run_in_order(calls: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Run `calls` in several threads, and yield the results in the order of `calls`."""
    count = min(MOST_THREADS, os.cpu_count() or 1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count, "negamax-convert") as pool:
            ahead: deque[Future[T]] = deque()
            for call in calls:
                ahead.append(pool.submit(call))
                if len(ahead) > count:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
    finally:
        torch.set_num_threads(before)
