from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.conftest import MODEL

if TYPE_CHECKING:
    import openai

PROMPT = "Tom has 47 apples"


def test_every_shape_of_prompt_is_answered(client: openai.OpenAI) -> None:
    prompts: list[Any] = [PROMPT, [PROMPT, "Hello"], [5, 6, 7], [[5, 6], [7, 8, 9]]]
    for prompt, num_choices in zip(prompts, (1, 2, 1, 2), strict=True):
        answer = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=3, extra_body={"ignore_eos": True}
        )
        assert [choice.index for choice in answer.choices] == list(range(num_choices))
        assert answer.usage and answer.usage.completion_tokens == 3 * num_choices
        assert answer.usage.completion_tokens_details and answer.usage.prompt_tokens_details


def test_default_limit_is_sixteen_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, extra_body={"ignore_eos": True})
    assert answer.usage and answer.usage.completion_tokens == 16


def test_streams_of_several_prompts_and_choices_add_up_to_the_whole_answer(
    client: openai.OpenAI,
) -> None:
    options: dict[str, Any] = {
        "prompt": [PROMPT, "Hello"],
        "n": 2,
        "max_tokens": 12,
        "seed": 3,
        "echo": True,
    }
    whole = client.completions.create(model=MODEL, **options)
    texts = [""] * 4
    finish: list[str | None] = [None] * 4
    for chunk in client.completions.create(model=MODEL, stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            finish[choice.index] = choice.finish_reason or finish[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert finish == [choice.finish_reason for choice in whole.choices]
    assert texts[0].startswith(PROMPT) and texts[2].startswith("Hello")


@pytest.mark.parametrize("interval", [1, 5, 1000])
def test_stream_interval_joins_tokens(client: openai.OpenAI, interval: int) -> None:
    extra = {"ignore_eos": True, "return_token_ids": True, "stream_interval": interval}
    for _ in range(10):  # the first is sent at once unless the machine stalls
        chunks = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=500, stream=True, extra_body=extra
        )
        counts = [
            len(choice.token_ids)  # type: ignore[attr-defined]
            for chunk in chunks
            for choice in chunk.choices
            if choice.token_ids  # type: ignore[attr-defined]
        ]
        assert sum(counts) == 500
        if counts[0] < 400:
            break
    assert counts[0] < 400
    assert all(count >= interval for count in counts[1:-1]) and len(counts) <= 2 + 499 // interval


def test_echo_with_no_tokens_scores_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=0, echo=True, logprobs=2
    )
    (choice,) = answer.choices
    assert choice.text == PROMPT
    logprobs = choice.logprobs
    assert (
        answer.usage
        and logprobs
        and logprobs.tokens
        and logprobs.token_logprobs
        and logprobs.top_logprobs
    )
    assert "".join(logprobs.tokens) == PROMPT
    assert len(logprobs.tokens) == answer.usage.prompt_tokens
    assert answer.usage.completion_tokens == 0
    assert logprobs.token_logprobs[0] is None
    for token, logprob, top in zip(
        logprobs.tokens[1:], logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True
    ):
        assert top[token] == logprob <= 0
    for token, offset in zip(logprobs.tokens, logprobs.text_offset or (), strict=True):
        assert PROMPT[offset:].startswith(token)


def test_logprobs_of_prompt_and_answer_are_one_list(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=4,
        echo=True,
        logprobs=0,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    logprobs = answer.choices[0].logprobs
    assert answer.usage and logprobs and logprobs.tokens
    assert len(logprobs.tokens) == answer.usage.prompt_tokens + 4
    assert "".join(logprobs.tokens).startswith(PROMPT)
    assert logprobs.token_logprobs and logprobs.top_logprobs
    assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
    # 0: only the token itself
    for token, logprob, top in zip(
        logprobs.tokens[1:], logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True
    ):
        assert top == {token: logprob}


def test_same_seed_gives_the_same_texts_and_choices_differ(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "prompt": [900, 77, 5],
        "n": 4,
        "seed": 7,
        "temperature": 2.0,
        "max_tokens": 24,
    }
    extra = {"top_k": 0, "top_p": 1.0, "ignore_eos": True}
    runs = [client.completions.create(model=MODEL, extra_body=extra, **options) for _ in range(2)]
    texts = [[choice.text for choice in run.choices] for run in runs]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


def test_logit_bias_decides_and_min_tokens_holds(http: httpx.Client) -> None:
    body = {
        "prompt": PROMPT,
        "logit_bias": {"70": 100},
        "temperature": 0,
        "max_tokens": 5,
        "min_tokens": 5,
        "return_token_ids": True,
    }
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["token_ids"] == [70] * 5


def test_stop_token_is_reported(http: httpx.Client) -> None:
    body = {
        "prompt": PROMPT,
        "logit_bias": {"70": 100},
        "stop_token_ids": [70],
        "temperature": 0,
        "max_tokens": 5,
    }
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 70)
