"""Send traces of requests to an OpenTelemetry collector (`--otlp-traces-endpoint`).

Each request to the engine is one span, named as in vLLM. A thread of the SDK sends spans in batches
and drops spans that it cannot send. OpenTelemetry is imported only for `--otlp-traces-endpoint`.
"""

import asyncio
import io
import logging
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from negamax import __version__
from negamax.api.recorder import RequestRecord
from negamax.base import env
from negamax.base.errors import ConfigError
from negamax.base.log import get_logger

logger = get_logger(__name__)

FLAG = "--otlp-traces-endpoint"
SPAN_NAME = "llm_request"
_DEFAULT_PATH = "/v1/traces"
_EXPORT_SECONDS = 5.0  # Time limit for sending a batch, including retries.
_MAX_ANSWER_BYTES = 64 * 1024  # Limit of bytes to read from a collector's answer.
_CLOSE_SECONDS = 3.0  # Time limit of a stopping server to send its last spans.
_PARENT_HEADERS = ("traceparent", "tracestate")


def check_endpoint(endpoint: str) -> str:
    """Return the collector's address. Add the path `/v1/traces` if the address has no path.

    Raises `ConfigError` if the address is invalid, or if OpenTelemetry is not installed.
    """
    try:
        parts = urlsplit(endpoint)
        is_http = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # Raised for an unclosed bracket or an invalid port in the URL.
        is_http = False
    if not is_http:
        hint = "use a collector's address for OTLP over HTTP, such as http://localhost:4318"
        raise ConfigError(f"{FLAG} is {endpoint!r}, which is not an HTTP address", hint=hint)
    try:
        is_installed = find_spec("opentelemetry.exporter.otlp.proto.http") is not None
        is_installed = is_installed and find_spec("opentelemetry.sdk.trace") is not None
    except ImportError:
        is_installed = False
    if not is_installed:
        hint = "pip install 'negamax[otlp]'"
        raise ConfigError(f"{FLAG} needs OpenTelemetry, which is not installed", hint=hint)
    if parts.path in ("", "/"):
        return f"{parts.scheme}://{parts.netloc}{_DEFAULT_PATH}"
    return endpoint


class RequestTracer:
    """Makes a span for every request that has ended. Only the event loop uses this object."""

    def __init__(self, endpoint: str) -> None:
        """Raises the errors of `check_endpoint`."""
        address = check_endpoint(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        service = {} if env.get("OTEL_SERVICE_NAME") else {"service.name": "negamax"}
        self._provider = TracerProvider(resource=Resource.create(service), shutdown_on_exit=False)
        session = _make_session()
        exporter = OTLPSpanExporter(endpoint=address, timeout=_EXPORT_SECONDS, session=session)
        self._provider.add_span_processor(BatchSpanProcessor(_wrap_exporter(exporter, address)))
        self._tracer = self._provider.get_tracer("negamax", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER
        self._failed = Status(StatusCode.ERROR)

    def ended(self, record: RequestRecord) -> None:
        offset = time.time_ns() - int(time.monotonic() * 1e9)  # Unix time minus monotonic time (ns)
        headers = record.headers
        carrier = {name: headers[name] for name in _PARENT_HEADERS if name in headers}
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._propagator.extract(carrier),
            kind=self._kind,
            attributes=build_span_attributes(record),
            start_time=int(record.arrival * 1e9) + offset,
        )
        if record.error is not None:
            span.set_attribute("error.type", type(record.error).__name__)
            span.set_status(self._failed)
        span.end(end_time=int(record.end * 1e9) + offset)

    async def close(self) -> None:
        """Send the remaining spans, for a few seconds at most."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        deadline = time.monotonic() + _CLOSE_SECONDS
        while thread.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)


def build_span_attributes(record: RequestRecord) -> dict[str, Any]:
    sampling = record.sampling
    start, first = record.start, record.first_token
    attributes = {
        "gen_ai.request.id": record.request_id,
        "gen_ai.request.model": record.model,
        "gen_ai.request.n": sampling.n,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.response.model": record.model,
        "gen_ai.response.finish_reasons": record.finish_reason.split(","),
        "gen_ai.usage.num_sequences": sampling.n,
        "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": record.num_output_tokens,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,  # newer name of prompt_tokens
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "gen_ai.usage.cached_tokens": record.num_cached_tokens,
        "gen_ai.latency.time_in_queue": _subtract(record.arrival, start),
        "gen_ai.latency.time_to_first_token": _subtract(record.arrival, first),
        "gen_ai.latency.time_in_model_prefill": _subtract(start, first),
        "gen_ai.latency.time_in_model_decode": _subtract(first, record.end),
        "gen_ai.latency.time_in_model_inference": _subtract(start, record.end),
        "gen_ai.latency.e2e": _subtract(record.arrival, record.end),
        "http.route": record.route,
        "http.request.header.x-request-id": record.http_request_id,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _subtract(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)


class _LastMessage(logging.Handler):
    """Keeps the SDK's latest log message. The SDK logs a message for each batch that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


def _make_session() -> Any:
    """Make an HTTP session that reads only the beginning of an answer."""
    import requests
    from requests.adapters import HTTPAdapter

    class BoundedAdapter(HTTPAdapter):
        def send(self, request: Any, *_: Any, **options: Any) -> Any:
            response = super().send(request, **{**options, "stream": True})
            with response.raw as raw:
                response.raw = io.BytesIO(raw.read(_MAX_ANSWER_BYTES, decode_content=False))
            return response

    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, BoundedAdapter())
    return session


def _wrap_exporter(exporter: Any, address: str) -> Any:
    """Wrap `exporter` so that only the first of several consecutive failures is logged."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    last_message = _LastMessage()
    sdk_logger = logging.getLogger("opentelemetry")
    sdk_logger.handlers[:], sdk_logger.propagate = [last_message], False

    class LoggedExporter(SpanExporter):
        """Only the SDK's thread changes this object."""

        def __init__(self) -> None:
            self._works = True

        def export(self, spans: Sequence[Any]) -> Any:
            result = exporter.export(spans)
            works = result is SpanExportResult.SUCCESS
            if self._works and not works:
                logger.warning(
                    "traces cannot be sent to %s and are dropped: %s", address, last_message.text
                )
            elif works and not self._works:
                logger.warning("traces are sent to %s again", address)
            self._works = works
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

    return LoggedExporter()
