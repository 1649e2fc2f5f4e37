from typing import Any

Message = dict[str, Any]


def system(content: Any, **more: Any) -> Message:
    return {"role": "system", "content": content, **more}


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def ai(content: Any = "", *calls: Message, **more: Any) -> Message:
    made = {"tool_calls": list(calls)} if calls else {}
    return {"role": "assistant", "content": content, **more, **made}


def call(name: str = "f", *, id: str = "c1", **arguments: Any) -> Message:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: Any, *, id: str = "c1") -> Message:
    return {"role": "tool", "tool_call_id": id, "content": content}


def text(value: str) -> Message:
    return {"type": "text", "text": value}
