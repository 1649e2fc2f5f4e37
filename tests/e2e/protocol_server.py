"""Run a small server that follows the chat protocol without a model, or breaks it in one way."""

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.e2e.scripted_server import call

MODEL = "protocol"
CALLED = ("What is the weather", "Get the weather", "Remind me", "I want to buy", "Book a")
REASONING = "I think about it step by step until I know it."
MODES = ("enabled", "disabled", "adaptive")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass
class Answer:
    reasoning: list[str]  # words of the reasoning
    content: list[str]
    call: tuple[str, str] | None  # name and arguments of the call
    finish_reason: str
    usage: dict[str, Any]


@dataclass
class Protocol:
    """Answer by the chat protocol. `fault` names the rule that the server breaks."""

    fault: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def refusal(self, body: dict[str, Any]) -> int | None:
        """Return the status with which `body` is refused, or None if it is accepted."""
        messages, choice = body["messages"], body.get("tool_choice")
        names = [tool["function"]["name"] for tool in body.get("tools", ())]
        if self.fault == "busy" and "日本" in str(messages):
            return 503
        if self.fault == "refuses efforts" and "reasoning_effort" in body:
            return 400
        if self.fault == "refuses histories" and str(messages).count("system") > 1:
            return 400
        if self.fault == "accepts everything":
            return None
        if body["model"] != MODEL:
            return 404
        is_wrong = (
            not messages
            or any(message["role"] == "nobody" for message in messages)
            or body.get("max_tokens", 0) < 0
            or body.get("temperature", 0) > 2
            or body.get("top_p", 1) > 1
            or body.get("thinking", {"type": "adaptive"})["type"] not in MODES
            or body.get("reasoning_effort", "low") not in EFFORTS
            or (isinstance(choice, dict) and choice["function"]["name"] not in names)
        )
        calls = [each["id"] for message in messages for each in message.get("tool_calls", ())]
        results = [message for message in messages if message["role"] == "tool"]
        is_wrong |= calls != [result["tool_call_id"] for result in results]
        is_wrong |= any(isinstance(result["content"], dict) for result in results)
        return 400 if is_wrong else None

    def answer(self, body: dict[str, Any]) -> Answer:
        is_off = body.get("thinking", {}).get("type") == "disabled"
        reasoning = [] if is_off and self.fault != "ignores disabled" else REASONING.split(" ")
        called = self._call(body)
        content = [] if called else self._content(body)
        if self.fault == "leaks thinking":
            content, reasoning = ["<think>", *reasoning, "</think>", *content], []
        if self.fault == "leaks thinking without tags":
            content, reasoning = [*reasoning, *content], []
        if self.fault == "reasons only" and reasoning:
            content = []
        limit = body.get("max_completion_tokens", body.get("max_tokens", 1000))
        arguments = called[1].split(" ") if called else []
        num_tokens = len(reasoning) + len(content) + len(arguments)
        finish = "length" if num_tokens > limit else "tool_calls" if called else "stop"
        if finish == "length":
            num_tokens, called = limit, None
            reasoning, content = reasoning[:limit], content[: max(limit - len(reasoning), 0)]
        num_tokens += self.fault == "counts wrong"
        num_prompt = len(str(body["messages"]))
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}
        usage |= {"total_tokens": num_prompt + num_tokens}
        known = [before["messages"] for before in self.bodies].count(body["messages"]) > 1
        cached = num_prompt - 1 if known and self.fault != "caches nothing" else 0
        usage |= {"prompt_tokens_details": {"cached_tokens": cached}}  # type: ignore[dict-item]
        details = {"reasoning_tokens": len(reasoning)}
        return Answer(
            reasoning, content, called, finish, usage | {"completion_tokens_details": details}
        )

    def _content(self, body: dict[str, Any]) -> list[str]:
        text = str(body["messages"])
        if self.fault == "writes Cyrillic":
            return ["Привет!"]
        if "PING" in text:
            return ["[SILENCE" if self.fault == "cuts brackets" else "[SILENCE]"]
        if "parameters" in text:
            return list(body["tools"][0]["function"]["parameters"]["properties"])
        return ["He", "has", "85."]

    def _call(self, body: dict[str, Any]) -> tuple[str, str] | None:
        tools, choice = body.get("tools"), body.get("tool_choice", "auto")
        if self.fault == "ignores tool_choice":
            choice = "auto"
        last = body["messages"][-1] if body["messages"] else {"role": "system"}
        is_asked = last["role"] == "user" and str(last["content"]).startswith(CALLED)
        if not tools or choice == "none" or (choice == "auto" and not is_asked):
            return None
        if self.fault == "never calls" and choice == "auto":
            return None
        named = choice["function"]["name"] if isinstance(choice, dict) else None
        functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        function = functions.get(named or next(iter(functions)), tools[0]["function"])
        properties = function["parameters"]["properties"]
        kinds = {"integer": 7, "string": "Paris"}
        required = function["parameters"].get("required", ())
        values = {
            name: properties[name].get("enum", [kinds[properties[name]["type"]]])[0]
            for name in required
        }
        if self.fault == "drops an argument":
            values = dict([*values.items()][1:])
        return function["name"], json.dumps(values, sort_keys=self.fault == "reorders keys")

    def events(self, answer: Answer) -> Iterator[dict[str, Any]]:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"reasoning_content": word} for word in spaced(answer.reasoning)]
        words = [*spaced(answer.content)]
        if self.fault == "streams other text" and words:
            words[-1] = words[-1].upper() + "!"
        if self.fault == "mixes deltas" and words and answer.reasoning:
            deltas[-1]["content"] = words.pop(0)
        deltas += [{"content": word} for word in words]
        if answer.call is not None:
            name, arguments = answer.call
            deltas += call(name, arguments[:5], arguments[5:])
        yield from ({"choices": [{"index": 0, "delta": delta}]} for delta in deltas)
        last = {"index": 0, "delta": {}, "finish_reason": answer.finish_reason}
        yield {"choices": [last]}
        yield {"choices": [], "usage": answer.usage}

    def whole(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": " ".join(answer.content) or None}
        message["reasoning_content"] = " ".join(answer.reasoning) or None
        if answer.call is not None:
            function = dict(zip(("name", "arguments"), answer.call, strict=True))
            message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
        choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason}
        return {"choices": [choice], "usage": answer.usage}


def spaced(words: list[str]) -> Iterator[str]:
    yield from (word if index == 0 else f" {word}" for index, word in enumerate(words))


@contextlib.contextmanager
def protocol_server(fault: str = "") -> Iterator[tuple[str, Protocol]]:
    protocol = Protocol(fault)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # headers and body are two segments

        def do_GET(self) -> None:
            found = {"/v1/models": {"data": [{"id": MODEL}]}, "/health": {}}.get(self.path)
            self._send(404 if found is None else 200, json.dumps(found or {}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path != "/v1/chat/completions":
                return self._send(404, '{"error": {"message": "no such route"}}')
            protocol.bodies.append(body)
            if status := protocol.refusal(body):
                message = f"refused for {body['model']}"
                return self._send(status, json.dumps({"error": {"message": message}}))
            answer = protocol.answer(body)
            if not body.get("stream"):
                return self._send(200, json.dumps(protocol.whole(answer)))
            lines = [json.dumps(event) for event in protocol.events(answer)]
            text = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
            self._send(200, text, "text/event-stream")

        def _send(self, status: int, text: str, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *values: object) -> None:
            """Do nothing, so that requests are not logged."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    # a short interval, because `shutdown` waits for it
    threading.Thread(target=partial(server.serve_forever, 0.02), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", protocol
    finally:
        server.shutdown()
        server.server_close()
