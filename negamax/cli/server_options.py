"""The HTTP server's options on the command line; vLLM's names first, SGLang's beside them."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from negamax.base.errors import ConfigError
from negamax.cli.engine_options import LOGS
from negamax.cli.flags import Flag, chosen_fields, flag_parameters, json_object, parameter
from negamax.models.chat_format import REASONING_PARSERS, TOOL_CALL_PARSERS, check_parsers
from negamax.options.key_file import keys_of_file
from negamax.options.server import SCHEDULING_POLICIES, ServerOptions

KEY_VARIABLE = "NEGAMAX_API_KEY"
SERVER, FORMAT, SECURITY, LIMITS = "Server", "Chat format", "Access", "Limits and supervision"

_TABLE = (
    Flag("host", SERVER, "Address to listen on."),
    Flag("port", SERVER, "Port to listen on; 0 picks a free one."),
    Flag(
        "node_health_port",
        SERVER,
        "Port of --host at which nodes other than 0 answer /livez, /readyz and /health; default: "
        "none.",
    ),
    Flag(
        "api_server_count",
        SERVER,
        "Processes that answer HTTP: more of them for many streams.",
        flags=("--api-server-count", "-asc"),
        also=("--tokenizer-worker-num",),
    ),
    Flag("served_model_name", SERVER, "Name in the API; may be repeated."),
    Flag("chat_template", FORMAT, "File that replaces the checkpoint's template."),
    Flag(
        "allow_special_tokens_in_text",
        FORMAT,
        "Control tokens spelled in messages become control tokens.",
    ),
    Flag(
        "tool_call_parser",
        FORMAT,
        "Format of tool calls; auto: the model's.",
        choices=TOOL_CALL_PARSERS,
    ),
    Flag(
        "reasoning_parser",
        FORMAT,
        "Where thinking goes; auto: apart from the content.",
        choices=REASONING_PARSERS,
    ),
    Flag(
        "stream_interval",
        SERVER,
        "Tokens of a stream that are sent together: more of them cost less.",
    ),
    Flag(
        "sse_keep_alive_interval",
        SERVER,
        "Seconds between comments in a silent stream; 0: none are sent.",
    ),
    Flag(
        "api_keys",
        SECURITY,
        f"Key that requests must carry; may be repeated. Better: {KEY_VARIABLE}, or "
        f"--api-key-file.",
        flags=("--api-key",),
        adds_up=True,
    ),
    Flag(
        "admin_api_key",
        SECURITY,
        "Key that opens every route, and alone those that act on the requests of all. Better: "
        "NEGAMAX_ADMIN_API_KEY.",
    ),
    Flag("allow_unauthenticated", SECURITY, "Listen beyond this machine without a key."),
    Flag(
        "allowed_origins",
        SECURITY,
        "Web origin that may call the server (CORS); may be repeated, '*' is all.",
    ),
    Flag(
        "allowed_hosts",
        SECURITY,
        "Further name in the Host header where no key is set; may be repeated, '*' is all.",
    ),
    Flag("ssl_certfile", SECURITY, "TLS certificate (chain), PEM."),
    Flag("ssl_keyfile", SECURITY, "TLS private key, PEM."),
    Flag(
        "scheduling_policy",
        LIMITS,
        "Whether the priority of a request counts before its arrival.",
        choices=SCHEDULING_POLICIES,
    ),
    Flag("max_body_bytes", LIMITS, "Largest request body, such as 32MiB.", is_size=True),
    Flag(
        "max_connections_per_address",
        LIMITS,
        "Connections of one client address to one server process; default: half of all it may "
        "have.",
    ),
    Flag("request_timeout", LIMITS, "Seconds a request may take in all; default: no limit."),
    Flag("slow_client_timeout", LIMITS, "Seconds until a client that does not read is cut off."),
    Flag("drain_timeout", LIMITS, "Seconds that open requests get after SIGTERM."),
    Flag(
        "max_engine_restarts",
        LIMITS,
        "Restarts of a dead engine within the window; after that the server ends, unless it has "
        "other replicas.",
    ),
    Flag("engine_restart_window", LIMITS, "Seconds that a restart counts."),
    Flag(
        "engine_hang_timeout",
        LIMITS,
        "Seconds without a step until a busy engine is replaced.",
        also=("--watchdog-timeout",),
    ),
    Flag(
        "enable_log_requests",
        LOGS,
        "Log each request: prompt, sampling, end, times.",
        flags=("--enable-log-requests",),
        also=("--log-requests",),
    ),
    Flag("max_log_len", LOGS, "Characters of a prompt in such a line."),
    Flag("enable_access_log", LOGS, "Log each HTTP request.", flags=("--enable-access-log",)),
    Flag(
        "log_stats",
        LOGS,
        "No line about the load while there is some.",
        flags=("--disable-log-stats",),
        turns_off=True,
    ),
    Flag("log_stats_interval", LOGS, "Seconds between two such lines."),
    Flag(
        "otlp_traces_endpoint", LOGS, "OpenTelemetry collector that gets a span per request (HTTP)."
    ),
)


_KEY_FILE = Annotated[
    str | None,
    typer.Option("--api-key-file", help="File with one key per line.", rich_help_panel=SECURITY),
]
_TEMPLATE_KWARGS = Annotated[
    str | None,
    typer.Option(
        "--default-chat-template-kwargs",
        metavar="JSON",
        help="Template variables of requests that do not set them.",
        rich_help_panel=FORMAT,
    ),
]


def with_server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command that takes `server: ServerOptions`: it gets every option of the table. The
    keys of all sources count. Errors: `ConfigError` for files and values that cannot be used."""
    own = inspect.signature(command, eval_str=True)
    parameters = [given for name, given in own.parameters.items() if name != "server"]
    flags = flag_parameters(ServerOptions, _TABLE, defaults={})
    special = [
        parameter("api_key_file", None, _KEY_FILE),
        parameter("default_chat_template_kwargs", None, _TEMPLATE_KWARGS),
    ]

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        chosen = chosen_fields(_TABLE, {flag.field: values.pop(flag.field) for flag in _TABLE})
        chosen["served_model_name"] = tuple(chosen["served_model_name"] or ())
        chosen["allowed_origins"] = _texts("--allowed-origins", chosen["allowed_origins"])
        chosen["allowed_hosts"] = _texts("--allowed-hosts", chosen["allowed_hosts"])
        chosen["api_keys"] = tuple(chosen["api_keys"] or ())
        chosen["api_key_file"] = values.pop("api_key_file")
        keys_of_file(chosen["api_key_file"])  # refused before the model is loaded
        kwargs = values.pop("default_chat_template_kwargs")
        kwargs = json_object("--default-chat-template-kwargs", kwargs)
        if kwargs:
            from negamax.text.chat_template import check_template_kwargs

            check_template_kwargs(kwargs)
        chosen["default_chat_template_kwargs"] = kwargs
        template = chosen["chat_template"]
        if template is not None and not Path(template).is_file():
            raise ConfigError(
                f"--chat-template is {template!r}, which is not a file",
                hint="give a Jinja template file",
            )
        check_parsers(
            tool_call_parser=chosen["tool_call_parser"], reasoning_parser=chosen["reasoning_parser"]
        )
        command(server=ServerOptions(**chosen), **values)

    wrapper.__signature__ = own.replace(parameters=[*parameters, *flags, *special])  # type: ignore[attr-defined]
    wrapper.flags = _TABLE  # type: ignore[attr-defined]
    return wrapper


def _texts(flag: str, values: list[str] | None) -> tuple[str, ...]:
    """Repeated values; each may be a JSON list too, as vLLM has it."""
    texts: list[str] = []
    for value in values or ():
        if not value.startswith("["):
            texts.append(value)
            continue
        try:
            listed = json.loads(value)
        except ValueError:
            listed = None
        if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
            raise ConfigError(
                f"{flag} is {value[:60]!r}, which is no JSON list of texts",
                hint=f"repeat {flag} instead",
            )
        texts += listed
    return tuple(texts)
