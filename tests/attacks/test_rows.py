import httpx

from tests.attacks.neighbour import unnoticed
from tests.e2e.conftest import Server

LARGEST_SEED = 2**63 - 1


def test_choices_after_the_largest_seed(server: Server, http: httpx.Client) -> None:
    engine = server.engine_pid()
    chat = {"model": "nano", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    generate = {
        "text": "Hello",
        "sampling_params": {"n": 3, "max_new_tokens": 4, "sampling_seed": LARGEST_SEED},
    }
    answers = unnoticed(
        server,
        lambda: [
            http.post("/v1/chat/completions", json=chat | {"seed": LARGEST_SEED, "n": 2}),
            http.post("/generate", json=generate),
        ],
        gap=1.0,
    )
    assert [answer.status_code for answer in answers] == [200, 200], [
        answer.text for answer in answers
    ]
    assert server.engine_pid() == engine
