"""The neighbour notices a server that stands still."""

from __future__ import annotations

import os
import signal
import time

from tests.attacks.neighbour import Neighbour
from tests.e2e.conftest import Server


def test_a_stopped_engine_is_a_gap_and_a_running_one_is_none(server: Server) -> None:
    with Neighbour(server) as quiet:
        time.sleep(0.5)
    assert quiet.errors == [] and quiet.longest_gap < 1.0
    with Neighbour(server) as stopped:
        os.kill(server.engine_pid(), signal.SIGSTOP)
        try:
            time.sleep(2.4)
        finally:
            os.kill(server.engine_pid(), signal.SIGCONT)
        time.sleep(0.5)
    assert stopped.longest_gap > 1.1  # less than it was where others want the cores
