"""The neighbour notices a server that stands still, and an attack that makes it so is found."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.attacks.neighbour import unnoticed
from tests.e2e.conftest import Server


def test_a_stopped_engine_is_a_gap_and_a_running_one_is_none(server: Server) -> None:
    unnoticed(server, lambda: time.sleep(0.5), gap=1.0)

    def stop() -> None:
        os.kill(server.engine_pid(), signal.SIGSTOP)
        try:
            time.sleep(0.8)
        finally:
            os.kill(server.engine_pid(), signal.SIGCONT)

    with pytest.raises(AssertionError, match="gap of a neighbour"):
        unnoticed(server, stop, gap=0.3)
