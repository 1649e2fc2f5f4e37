import os
import signal
import time

import pytest

from tests.attacks import concurrent_client
from tests.attacks.concurrent_client import unnoticed
from tests.e2e.conftest import Server


def test_only_a_stopped_engine_is_a_gap(talker: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    unnoticed(talker, lambda: time.sleep(0.5), gap=1.0)

    def stop() -> None:
        os.kill(talker.engine_pid(), signal.SIGSTOP)
        try:
            time.sleep(1.0)
        finally:
            os.kill(talker.engine_pid(), signal.SIGCONT)

    def is_noticed() -> bool:
        try:
            unnoticed(talker, stop, gap=0.3)
        except AssertionError as error:
            return "gap of a concurrent client" in str(error)
        return False

    monkeypatch.setattr(concurrent_client, "_TRIES", 1)
    monkeypatch.setattr(concurrent_client, "slowness", lambda: 1.0)
    # With other load a gap counts less than it was, so try several times.
    assert any(is_noticed() for _ in range(10))
