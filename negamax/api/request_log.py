"""Log requests (`--enable-log-requests`) and HTTP requests (`--enable-access-log`).

The logs contain no headers and no URL queries, because a header or a query may contain a key.
"""

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import Request

from negamax.api.recorder import RequestRecord
from negamax.base.log import get_logger
from negamax.config.grammar import Grammar, Reasoning
from negamax.scheduler.request import SamplingParams
from negamax.text.tokenizer import Tokenizer

logger = get_logger(__name__)

_SPARE_TOKENS = 4  # Extra tokens to decode, because one character may need several tokens.
_DEFAULTS = msgspec.structs.asdict(SamplingParams())


class RequestLog:
    """Logs one line when a request to the engine starts, and one line when it ends."""

    def __init__(self, tokenizer: Tokenizer, *, max_prompt_chars: int) -> None:
        """At most `max_prompt_chars` characters of a prompt are logged."""
        self._tokenizer = tokenizer
        self._max_prompt_chars = max_prompt_chars

    def began(self, record: RequestRecord, prompt_token_ids: Sequence[int]) -> None:
        fields: dict[str, Any] = {
            "request_id": record.request_id,
            "x_request_id": record.http_request_id,
            "route": record.route,
            "prompt_tokens": record.num_prompt_tokens,
            "stream": record.is_stream,
            "sampling": _describe_sampling(record.sampling),
        }
        parts = [
            f"request {record.request_id}: {record.route}",
            f"x-request-id {record.http_request_id}",
            f"{record.num_prompt_tokens} prompt tokens",
            "streamed" if record.is_stream else "whole",
            " ".join(f"{name}={value}" for name, value in fields["sampling"].items()),
        ]
        if self._max_prompt_chars:
            fields["prompt"] = self._read_head(prompt_token_ids)
            parts.append(f"prompt {fields['prompt']!r}")
        logger.info("%s", ", ".join(parts), extra={"fields": fields})

    def ended(self, record: RequestRecord) -> None:
        fields: dict[str, Any] = {
            "request_id": record.request_id,
            "finish_reason": record.finish_reason,
            "prompt_tokens": record.num_prompt_tokens,
            "cached_tokens": record.num_cached_tokens,
            "output_tokens": record.num_output_tokens,
            "queue_s": _round_seconds(record.arrival, record.start),
            "first_token_s": _round_seconds(record.arrival, record.first_token),
            "total_s": _round_seconds(record.arrival, record.end),
        }
        names = {"queue_s": "queued", "first_token_s": "first token after", "total_s": "in all"}
        times = [
            f"{name} {fields[key]:.3f} s" for key, name in names.items() if fields[key] is not None
        ]
        logger.info(
            "request %s: finished (%s), %d prompt tokens (%d cached), %d output tokens, %s",
            record.request_id,
            record.finish_reason,
            record.num_prompt_tokens,
            record.num_cached_tokens,
            record.num_output_tokens,
            ", ".join(times),
            extra={"fields": fields},
        )

    def _read_head(self, prompt_token_ids: Sequence[int]) -> str:
        limit = self._max_prompt_chars
        few = list(prompt_token_ids[: limit + _SPARE_TOKENS])  # Enough for `limit` characters.
        text = self._tokenizer.decode(few, skip_special_tokens=False)
        is_whole = len(text) <= limit and len(few) == len(prompt_token_ids)
        return text if is_whole else text[:limit] + "…"


def log_refusal(request: Request, status: int, reason: str, *, is_asked_for: bool) -> None:
    """Log a refused request. The log level is info if `is_asked_for`, else debug."""
    fields = {
        "x_request_id": request.state.request_id,
        "route": request.url.path,
        "status": status,
        "reason": reason,
    }
    logger.log(
        logging.INFO if is_asked_for else logging.DEBUG,
        "request %s: %r refused (%d): %r",
        request.state.request_id,
        request.url.path,
        status,
        reason,
        extra={"fields": fields},
    )


def log_access(
    *, client: str, method: str, path: str, status: int, seconds: float, request_id: str
) -> None:
    """Log an HTTP request at the end of its response. Status 0 means that no response was sent."""
    fields = {
        "client": client,
        "method": method,
        "path": path,
        "status": status,
        "seconds": round(seconds, 6),
        "x_request_id": request_id,
    }
    message = f"{client} {method} {path!r} {status} {seconds:.3f} s, x-request-id {request_id}"
    logger.info("%s", message, extra={"fields": fields})


def _describe_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters that differ from the defaults. Abbreviate long values."""
    fields = msgspec.structs.asdict(sampling)
    shown = {name: value for name, value in fields.items() if value != _DEFAULTS[name]}
    for name, value in shown.items():
        if isinstance(value, Grammar):
            shown[name] = value.kind
        elif isinstance(value, Reasoning):
            shown[name] = value.state
        elif isinstance(value, dict | tuple) and len(value) > 8:
            shown[name] = f"{len(value)} entries"
        elif isinstance(value, tuple):
            shown[name] = list(value)
    return shown


def _round_seconds(start: float, end: float | None) -> float | None:
    return None if end is None else round(max(0.0, end - start), 6)
