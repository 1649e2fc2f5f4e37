from typing import Any

import httpx
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.e2e.api_support import CHAT, QUESTION, WEATHER, WEATHER_QUESTION, error_of, post
from tests.e2e.conftest import MODEL

TEXT = "Tom's naïve 👩‍🚀 日本語\n[e~[ <think>"


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_text_survives_the_round_trip(http: httpx.Client, prefix: str) -> None:
    tokens = post(http, f"{prefix}/tokenize", model=MODEL, prompt=TEXT, return_token_strs=True)
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 4096
    assert "<think>" in tokens["token_strs"] and "[e~[" in tokens["token_strs"]
    body = {"tokens": tokens["tokens"]}
    back = post(http, f"{prefix}/detokenize", model=MODEL, **body)
    assert back == {"prompt": TEXT, "text": TEXT}
    shorter = post(http, f"{prefix}/detokenize", **body, skip_special_tokens=True)
    assert shorter["text"] == TEXT.replace("[e~[", "")


def test_lists_give_lists_and_tokenizer_info_makes_the_same_prompts(http: httpx.Client) -> None:
    """Render the template as a client would, and look up the ids of the named tokens."""
    info = http.get("/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"]) == ("[e~[", "]~!b[")
    assert info["model_max_length"] == 4096
    for name in ("eos_token", "bos_token", "unk_token"):
        tokens = post(http, "/tokenize", prompt=info[name], add_special_tokens=False)
        assert tokens["count"] == 1
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(info["chat_template"])
    prompt = template.render(messages=QUESTION, add_generation_prompt=True)
    assert prompt == post(http, f"{CHAT}/render", messages=QUESTION)["prompt"]
    texts = ["one", "two words", ""]
    tokens = post(http, "/tokenize", prompt=texts)
    assert tokens["count"] == [len(ids) for ids in tokens["tokens"]] and len(tokens["count"]) == 3
    assert "token_strs" not in tokens
    assert post(http, "/detokenize", tokens=tokens["tokens"])["text"] == texts
    assert post(http, "/detokenize", tokens=[])["text"] == ""


@pytest.mark.parametrize(
    "chat",
    [{"messages": QUESTION}, {"messages": WEATHER_QUESTION, "tools": [WEATHER]}],
    ids=["plain", "tools"],
)
def test_tokenize_equals_the_prompt_of_a_chat(http: httpx.Client, chat: dict[str, Any]) -> None:
    tokens = post(http, "/tokenize", **chat)
    answer = post(http, CHAT, **chat, max_tokens=1, return_token_ids=True)
    assert tokens["tokens"] == answer["prompt_token_ids"]
    assert post(http, "/tokenize", **chat, add_generation_prompt=False)["count"] < tokens["count"]
    off = post(http, "/tokenize", **chat, chat_template_kwargs={"thinking_mode": "disabled"})
    assert off["count"] > tokens["count"]  # The closed think block adds tokens.


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": QUESTION}, 400, "prompt"),
        ("/tokenize", {"prompt": [1]}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, "x"]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [[1], 2]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [10**9]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [[7] * 2**17] * 2 + [[7]]}, 400, "tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_request_names_its_field(
    http: httpx.Client, path: str, fields: dict[str, Any], status: int, param: str
) -> None:
    error_of(http.post(path, json=fields), status, param=param)
