import math
from pathlib import Path

import pytest

from negamax.base import env


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({}, math.inf),
        ({"cpu.max": "nonsense"}, math.inf),
    ],
)
def test_container_quota_is_read(tmp_path: Path, files: dict[str, str], cores: float) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert env._cpu_quota(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [(0.5, 1), (1.9, 1), (math.inf, None)])
def test_no_more_threads_than_the_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float, cores: int | None
) -> None:
    unbounded = env.usable_cores()
    monkeypatch.setattr(env, "_cpu_quota", lambda folder: quota)
    assert env.usable_cores() == (unbounded if cores is None else cores)
