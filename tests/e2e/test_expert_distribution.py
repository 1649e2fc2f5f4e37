import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.api_support import error_of, post
from tests.e2e.conftest import eventually, serving

NAMES = ("start", "stop", "dump")
RESTARTS = "negamax:engine_restarts_total"
NO_RECORD = "no recording of experts was started"


def ask(http: httpx.Client, name: str) -> httpx.Response:
    return http.post(f"/{name}_expert_distribution_record")


def generate(http: httpx.Client, count: int) -> Any:
    sampling = {"max_new_tokens": 24, "temperature": 0.8, "ignore_eos": True}
    return post(http, "/generate", text=["Tom has 47 apples"] * count, sampling_params=sampling)


def test_without_the_option_nothing_is_counted(http: httpx.Client) -> None:
    option = "--expert-distribution-recorder-mode stat"
    for name in NAMES:
        assert option in error_of(ask(http, name), 400)["message"]
        assert http.get(f"/{name}_expert_distribution_record").status_code == 405
    assert "expert_balancedness" not in http.get("/metrics").text


def test_a_record_holds_what_ran_between_start_and_stop(tmp_path: Path) -> None:
    options = ("--expert-distribution-recorder-mode", "stat", "--device", "cpu")
    with serving(*options, log_file=tmp_path / "log") as server, server.http() as http:
        assert NO_RECORD in error_of(ask(http, "dump"), 400)["message"]
        assert "--profile-dir" in error_of(http.post("/start_profile"), 400)["message"]
        generate(http, 1)
        assert ask(http, "start").text == "Start recording expert distribution.\n"
        answers = generate(http, 2)
        assert ask(http, "stop").text == "Stop recording expert distribution.\n"
        first = ask(http, "dump").json()
        generate(http, 1)
        assert ask(http, "dump").json() == first
        totals = {sum(layer) for layer in first["logical_count"]}
        usage = [answer["meta_info"] for answer in answers]
        num_tokens = sum(
            each["prompt_tokens"] - each["cached_tokens"] + each["completion_tokens"] - 1
            for each in usage
        )
        (total,) = totals
        assert total % num_tokens == 0 and total // num_tokens in (1, 2, 4)  # experts per token
        assert server.gauge("negamax:expert_balancedness") == 1.0


@pytest.mark.full
def test_experts_move_under_load_and_after_a_restart(tmp_path: Path) -> None:
    options = (
        "--device", "cpu", "-tp", "2", "--enable-expert-parallel", "--enable-eplb",
        "--eplb-config", '{"step_interval": 6, "window_size": 6}', "--num-redundant-experts", "4",
        "--api-server-count", "2",
    )  # fmt: skip
    with serving(*options, log_file=tmp_path / "log") as server, server.http() as http:
        for number in range(2):
            assert ask(http, "start").status_code == 200
            for _ in range(4):
                generate(http, 6)
            found = ask(http, "dump").json()
            assert found["engines"][0]["balancedness"] > 0.8
            assert sum(map(sum, found["logical_count"])) > 0
            assert server.gauge("negamax:experts_moved_total") > 0
            os.kill(server.engine_pid(), signal.SIGKILL)
            assert eventually(lambda number=number: server.gauge(RESTARTS) > number)
            assert eventually(lambda: NO_RECORD in ask(http, "dump").text)
