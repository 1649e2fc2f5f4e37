from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx

from nano.suites import retrieval
from negamax.evals.suites import load_problems
from tests.e2e.api_support import CHAT, CHAT_DIALECT, QUESTION, WEATHER, WEATHER_QUESTION
from tests.e2e.conftest import Server, shared

if TYPE_CHECKING:
    import openai

MODEL = "nano-m3"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


def closed(**properties: Any) -> dict[str, Any]:
    declared = {"type": "object", "properties": properties, "required": [*properties]}
    return declared | {"additionalProperties": False}


STEP = closed(name={"enum": ["cut", "glue"]}, minutes={"const": 5})
STEPS = {"type": "array", "minItems": 2, "maxItems": 2, "items": STEP}
NESTED = closed(title={"type": "string", "maxLength": 12}, steps=STEPS, done={"type": "boolean"})
PLAN = {"type": "function", "function": {"name": "make_plan", "strict": True, "parameters": NESTED}}


server = shared(model=MODEL)


def chat(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post(CHAT, json={**GREEDY, "messages": QUESTION, "max_tokens": 300, **fields})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice


def test_modes_of_thinking(http: httpx.Client) -> None:
    for mode in ("enabled", "adaptive", None):
        fields = {} if mode is None else {"thinking": {"type": mode}}
        message = chat(http, **fields)["message"]
        assert "47 + 38" in message["reasoning"] and "85" in message["content"], mode
    message = chat(http, thinking={"type": "disabled"})["message"]
    assert message["reasoning"] is None and "apples" in message["content"]
    spent = chat(http, thinking_token_budget=4)["message"]
    assert len(spent["reasoning"]) < 30 and "</mm:think>" not in str(spent["content"])


def test_a_call_its_result_and_the_answer(client: openai.OpenAI, http: httpx.Client) -> None:
    options = {**GREEDY, "messages": WEATHER_QUESTION, "tools": [WEATHER]}
    whole = client.chat.completions.create(**options).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    streamed = CHAT_DIALECT.ask(http, options, is_streamed=True)
    assert streamed.calls == [("get_weather", call.function.arguments)]
    assert streamed.reasoning == whole.message.reasoning_content
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 19}'}
    options["messages"] = [*WEATHER_QUESTION, whole.message.model_dump(exclude_none=True), result]
    final = client.chat.completions.create(**options).choices[0]
    assert final.finish_reason == "stop" and "19" in final.message.content


def test_nested_arguments_keep_their_types(http: httpx.Client) -> None:
    forced = {"type": "function", "function": {"name": "make_plan"}}
    choice = chat(http, tools=[PLAN], tool_choice=forced, max_tokens=400)
    (call,) = choice["message"]["tool_calls"]
    found = json.loads(call["function"]["arguments"])
    assert [step["minutes"] for step in found["steps"]] == [5, 5]
    assert {step["name"] for step in found["steps"]} <= {"cut", "glue"}
    assert isinstance(found["done"], bool) and isinstance(found["title"], str)


def test_structured_output_follows_thinking_and_may_look_like_a_call(http: httpx.Client) -> None:
    message = chat(http, structured_outputs={"regex": r'\{"number": [0-9]{2}\}'})["message"]
    assert message["reasoning"] and json.loads(message["content"]) == {"number": 85}
    for mode in ("enabled", "disabled"):
        choice = {"choice": ["[SILENCE]"]}
        message = chat(http, structured_outputs=choice, thinking={"type": mode})["message"]
        assert message["content"] == "[SILENCE]"
        assert bool(message["reasoning"]) == (mode == "enabled")
    opener = "]<]minimax[>[<tool_call>"
    found = chat(http, structured_outputs={"choice": [opener]}, thinking={"type": "disabled"})
    assert found["message"]["content"] == opener and "tool_calls" not in found["message"]
    assert found["finish_reason"] == "stop"
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    response = http.post(CHAT, json={**GREEDY, "messages": [{"role": "user", "content": [part]}]})
    assert response.status_code == 400 and "image" in response.json()["error"]["message"]


def test_it_reads_a_digit_in_an_image_through_each_api(http: httpx.Client) -> None:
    (problem,) = load_problems("nano-vision", 1)
    image, text = problem.messages[0]["content"]
    source = {"type": "base64", "media_type": "image/png"}
    source["data"] = image["image_url"]["url"].partition(",")[2]
    part = {"type": "input_image", "image_url": image["image_url"]["url"]}
    asked: tuple[tuple[str, str, list[Any]], ...] = (
        (CHAT, "messages", [image, text]),
        ("/v1/messages", "messages", [{"type": "image", "source": source}, text]),
        ("/v1/responses", "input", [part, {"type": "input_text", "text": text["text"]}]),
    )
    for path, field, content in asked:
        limit = {"max_tokens": 60} if field == "messages" else {"max_output_tokens": 60}
        response = http.post(
            path, json={**GREEDY, **limit, field: [{"role": "user", "content": content}]}
        )
        assert f"The digit is {problem.answer}." in response.text, (path, response.text)


def test_concurrent_long_prompts_find_facts_prefixes(server: Server, http: httpx.Client) -> None:
    """The second time, only the last block of 128 tokens of a prompt is not cached."""
    problems = [each for each in retrieval.problems("2k", 9, 11) if each.fact is not None][:2]

    def ask(problem: retrieval.RetrievalProblem) -> dict[str, Any]:
        body = {**GREEDY, "messages": list(problem.messages), "max_tokens": 60}
        found: dict[str, Any] = http.post(CHAT, json=body).json()
        return found

    with ThreadPoolExecutor(6) as pool:
        first, second = list(pool.map(ask, problems)), list(pool.map(ask, problems))
    for problem, once, again in zip(problems, first, second, strict=True):
        assert problem.fact is not None
        content = once["choices"][0]["message"]["content"]
        assert problem.fact.value in content
        assert again["choices"][0]["message"]["content"] == content
        usage = again["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached % 128 == 0 and cached > usage["prompt_tokens"] - 129 > 1000
    assert server.gauge("vllm:kv_cache_usage_perc") == 0
