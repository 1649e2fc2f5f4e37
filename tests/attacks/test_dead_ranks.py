import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.api_support import CHAT, error_of
from tests.e2e.conftest import HELD, STUB, Server, eventually, serving
from tests.e2e.test_server_processes import LONG, last_lines_after, ranks_of, wait_until_ready


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("held") / "file"


@pytest.fixture(scope="module")
def mortal_ranks(tmp_path_factory: pytest.TempPathFactory, held: Path) -> Iterator[Server]:
    options = ("--device", "cpu", "--tensor-parallel-size", "2", "--engine-restart-window", "0.1")
    log_file = tmp_path_factory.mktemp("mortal_ranks") / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENGINE_MODULE", HELD)
        patch.setenv("HELD_ENGINE", str(held))
        with serving(*options, log_file=log_file, program=STUB) as server:
            yield server
            assert "Traceback" not in server.log


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_rank_that_dies_while_idle_is_replaced(mortal_ranks: Server, held: Path, rank: int) -> None:
    engine = mortal_ranks.engine_pid()
    with mortal_ranks.http() as http:
        assert eventually(lambda: http.get("/readyz").status_code == 200)
        held.touch()
        try:
            os.kill(ranks_of(engine)[rank], signal.SIGKILL)
            cause = f"rank {rank} ended with exit code -9"
            assert eventually(lambda: cause in http.get("/readyz").text)
            error_of(http.get("/readyz"), 503)
            error_of(http.post(CHAT, json=LONG), 503, code="engine_restarting")
        finally:
            held.unlink()
        wait_until_ready(mortal_ranks)
        assert mortal_ranks.engine_pid() != engine
        assert http.post(CHAT, json=LONG | {"max_tokens": 5}).status_code == 200


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_streams_of_a_dead_rank_end_with_a_retryable_error(mortal_ranks: Server, rank: int) -> None:
    victim = ranks_of(mortal_ranks.engine_pid())[rank]
    error, done = last_lines_after(mortal_ranks, lambda: os.kill(victim, signal.SIGKILL))
    assert f"rank {rank} ended with exit code -9" in error and "service_unavailable_error" in error
    assert done == "data: [DONE]"
    wait_until_ready(mortal_ranks)


def test_stopped_rank_makes_the_server_unready(mortal_ranks: Server) -> None:
    engine = mortal_ranks.engine_pid()
    victim = ranks_of(engine)[1]
    with mortal_ranks.http() as http:
        os.kill(victim, signal.SIGSTOP)
        try:
            assert eventually(lambda: http.get("/readyz").status_code == 503)
            assert "rank 1" in error_of(http.get("/readyz"), 503)["message"]
        finally:
            os.kill(victim, signal.SIGCONT)
        assert eventually(lambda: http.get("/readyz").status_code == 200)
        assert http.post(CHAT, json=LONG | {"max_tokens": 5}).status_code == 200
        assert mortal_ranks.engine_pid() == engine


@pytest.mark.parametrize("part", [pytest.param("engine", marks=pytest.mark.full), "rank"])
def test_streams_of_a_stopped_part_end_with_all_tokens(mortal_ranks: Server, part: str) -> None:
    wait_until_ready(mortal_ranks)
    engine = mortal_ranks.engine_pid()
    victim = engine if part == "engine" else ranks_of(engine)[1]

    def stop() -> None:
        os.kill(victim, signal.SIGSTOP)
        try:
            assert eventually(lambda: mortal_ranks.get("/readyz").status_code == 503)
            time.sleep(0.3)
        finally:
            os.kill(victim, signal.SIGCONT)

    usage = {"stream_options": {"include_usage": True}}
    last, done = last_lines_after(mortal_ranks, stop, max_tokens=60, **usage)
    assert '"completion_tokens":240' in last and "error" not in last
    assert done == "data: [DONE]"
    assert mortal_ranks.engine_pid() == engine
