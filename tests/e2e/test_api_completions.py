from typing import Any

import httpx
import pytest

from tests.e2e.api_support import COMPLETIONS, GREEDY, post, stream

PROMPT = "Tom has 47 apples"


def complete(http: httpx.Client, **fields: Any) -> Any:
    return post(http, COMPLETIONS, **{"prompt": PROMPT, **fields})


@pytest.mark.parametrize(
    ("prompt", "num_choices"),
    [(PROMPT, 1), ([PROMPT, "Hello"], 2), ([5, 6, 7], 1), ([[5, 6], [7, 8]], 2), (["a", [5]], 2)],
    ids=str,
)
def test_every_shape_of_prompt_is_answered(client: Any, prompt: Any, num_choices: int) -> None:
    extra = {"ignore_eos": True}
    answer = client.completions.create(model="nano", prompt=prompt, max_tokens=3, extra_body=extra)
    assert [choice.index for choice in answer.choices] == list(range(num_choices))
    assert answer.usage.completion_tokens == 3 * num_choices
    assert answer.usage.completion_tokens_details and answer.usage.prompt_tokens_details


def test_streams_of_prompts_and_choices_add_up_to_the_whole_answer(http: httpx.Client) -> None:
    body = {"prompt": [PROMPT, "Hello"], "n": 2, "max_tokens": 12, "seed": 3, "echo": True}
    whole = complete(http, **body)["choices"]
    texts, reasons = [""] * 4, [None] * 4
    for event in stream(http, COMPLETIONS, **body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    assert texts == [choice["text"] for choice in whole]
    assert reasons == [choice["finish_reason"] for choice in whole]
    assert texts[0].startswith(PROMPT) and texts[2].startswith("Hello")


@pytest.mark.parametrize("interval", [pytest.param(1, marks=pytest.mark.full), 5, 1000])
def test_stream_interval_joins_tokens(http: httpx.Client, interval: int) -> None:
    body = {"prompt": PROMPT, "max_tokens": 120, "ignore_eos": True, "return_token_ids": True}
    for _ in range(10):  # On a stalled machine the first fragment is late, too.
        events = stream(http, COMPLETIONS, **body, stream_interval=interval)
        counts = [len(event["choices"][0]["token_ids"]) for event in events]
        counts = [count for count in counts if count]
        assert sum(counts) == 120
        if counts[0] < 100:
            break
    assert counts[0] < 100
    assert all(count >= interval for count in counts[1:-1]) and len(counts) <= 2 + 119 // interval


def test_echo_scores_the_prompt_alone_or_with_the_answer(http: httpx.Client) -> None:
    answer = complete(http, max_tokens=0, echo=True, logprobs=2)
    (choice,) = answer["choices"]
    assert choice["text"] == PROMPT
    logprobs, usage = choice["logprobs"], answer["usage"]
    assert "".join(logprobs["tokens"]) == PROMPT
    assert (len(logprobs["tokens"]), 0) == (usage["prompt_tokens"], usage["completion_tokens"])
    (first, *scores), (_, *tops) = logprobs["token_logprobs"], logprobs["top_logprobs"]
    assert first is None
    for token, logprob, top in zip(logprobs["tokens"][1:], scores, tops, strict=True):
        assert top[token] == logprob <= 0
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert PROMPT[offset:].startswith(token)
    answer = complete(http, max_tokens=4, echo=True, logprobs=0, temperature=0, ignore_eos=True)
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == answer["usage"]["prompt_tokens"] + 4
    assert "".join(logprobs["tokens"]).startswith(PROMPT)
    (first, *scores), (first_top, *tops) = logprobs["token_logprobs"], logprobs["top_logprobs"]
    assert first is first_top is None
    for token, logprob, top in zip(logprobs["tokens"][1:], scores, tops, strict=True):
        assert top == {token: logprob}  # With 0 the list has only the token itself.


def test_same_seed_gives_the_same_texts_and_choices_differ(http: httpx.Client) -> None:
    body = {"prompt": [900, 77, 5], "n": 4, "seed": 7, "temperature": 2.0, "max_tokens": 24}
    body |= {"top_k": 0, "top_p": 1.0, "ignore_eos": True}
    answers = [complete(http, **body)["choices"] for _ in range(2)]
    first, second = ([choice["text"] for choice in choices] for choices in answers)
    assert first == second and len(set(first)) > 1


def test_bias_decides_min_tokens_hold_and_sixteen_is_the_default(http: httpx.Client) -> None:
    body = {**GREEDY, "logit_bias": {"70": 100}, "max_tokens": 5}
    (choice,) = complete(http, **body, min_tokens=5, return_token_ids=True)["choices"]
    assert choice["token_ids"] == [70] * 5
    (choice,) = complete(http, **body, stop_token_ids=[70])["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 70)
    assert complete(http, ignore_eos=True)["usage"]["completion_tokens"] == 16
