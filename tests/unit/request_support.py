from typing import Any

from negamax.api.dialects.chat.schema import ChatRequest
from negamax.engine.client.output import RequestOutput

HELLO = [{"role": "user", "content": "Hello"}]
COUNTS = ("num_prompt_tokens", "num_output_tokens", "num_cached_tokens", "index")
OPTIONAL = ("logprobs", "prompt_logprobs", "finish_reason", "stop_reason", "error")


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.parse({"messages": HELLO, **fields})


def make_output(**fields: Any) -> RequestOutput:
    defaults: dict[str, Any] = {"request_id": "r", "token_ids": [], "pieces": []}
    defaults |= dict.fromkeys(COUNTS, 0) | dict.fromkeys(OPTIONAL)
    return RequestOutput(**defaults | fields)
