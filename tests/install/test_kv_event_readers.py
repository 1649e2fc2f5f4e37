import random
from pathlib import Path

import pytest

from tests.e2e.api_support import CHAT, GREEDY, post
from tests.e2e.conftest import eventually, serving
from tests.e2e.test_kv_event_stream import complete, make_option
from tests.install.routers import running_router
from tests.ports import free_port

ROUTER = "vllm-router==0.1.17"
pytestmark = pytest.mark.timeout(900)  # for downloads


def test_vllm_router_sends_prompts_where_their_prefix_is_cached(tmp_path: Path) -> None:
    """Start the router after some prompts, so that it must replay their events."""
    ports = [free_port() for _ in range(2)]
    options = [make_option(port, replay_endpoint=f"tcp://127.0.0.1:{port + 1}") for port in ports]
    rng = random.Random(7)
    prompts = [[rng.randrange(40, 250) for _ in range(320)] for _ in range(12)]
    size = "--block-size=16"
    with (
        serving(options[0], size, log_file=tmp_path / "log 0") as first,
        serving(options[1], size, log_file=tmp_path / "log 1") as second,
        first.http() as a,
        second.http() as b,
    ):
        for at in range(8):
            assert complete((a, b)[at % 2], prompts[at]) == 0
        line = ["--policy", "kv_aware", "--kv-event-block-size", "16", "--kv-event-model", "nano"]
        line += ["--worker-urls", first.url, second.url]
        for url, port in ((first.url, ports[0]), (second.url, ports[1])):
            line += ["--kv-event-source", f"{url}=tcp://127.0.0.1:{port}"]
            line += ["--kv-event-replay-source", f"{url}=tcp://127.0.0.1:{port + 1}"]
        with running_router(tmp_path, ROUTER, "vllm-router", *line) as http:
            for at in range(8, 12):  # The first of each server shows the router a gap.
                assert complete((a, b)[at % 2], prompts[at]) == 0
            assert eventually(lambda: complete(http, [*prompts[11], 50]) == 320)
            assert [complete(http, [*prompt, 60, 61]) for prompt in prompts] == [320] * 12
            chats = [
                GREEDY | {"messages": [{"role": "user", "content": f"{at} apples. " * 60}]}
                for at in range(8)
            ]
            for at, chat in enumerate(chats):
                post((a, b)[at % 2], CHAT, **chat, max_tokens=2)
            for chat in chats:
                usage = post(http, CHAT, **chat, max_tokens=2)["usage"]
                assert usage["prompt_tokens_details"]["cached_tokens"] > 160
