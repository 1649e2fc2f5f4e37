import httpx

from tests.attacks.concurrent_client import unnoticed
from tests.e2e.conftest import Server

CHAT = {"model": "nano", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
LARGEST = {"n": 3, "max_new_tokens": 4, "sampling_seed": 2**63 - 1}


def test_choices_after_the_largest_seed_get_answers(server: Server, http: httpx.Client) -> None:
    engine = server.engine_pid()

    def ask() -> list[httpx.Response]:
        return [
            http.post("/v1/chat/completions", json=CHAT | {"seed": 2**63 - 1, "n": 2}),
            http.post("/generate", json={"text": "Hello", "sampling_params": LARGEST}),
        ]

    assert [answer.status_code for answer in unnoticed(server, ask, gap=1.0)] == [200, 200]
    assert server.engine_pid() == engine
