from typing import Any

from negamax.api.dialects.chat.schema import ChatRequest

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.parse({"messages": HELLO, **fields})
