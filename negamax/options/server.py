"""The HTTP server's options."""

import ipaddress
from dataclasses import dataclass
from typing import Any

from negamax.base.errors import ConfigError
from negamax.options.engine import LOGS
from negamax.options.flags import check_options, option, optional
from negamax.options.key_file import check_keys

MAX_API_SERVERS = 64
RULES = ("longest", "area")  # rules for resizing images
SCHEDULING_POLICIES = ("fcfs", "priority")
SERVER, FORMAT, SECURITY, LIMITS = "Server", "Chat format", "Access", "Limits and supervision"


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of the HTTP server. Times are in seconds."""

    host: str = option("127.0.0.1", "Listen on this address.", panel=SERVER)
    port: int = option(8000, "Listen on this port; 0 picks a free port.", least=0, most=65535)
    node_health_port: int | None = optional(
        "On all nodes except node 0, answer /livez, /readyz and /health on this port of --host "
        "(default: no port).",
        least=0,
        most=65535,
    )
    api_server_count: int = option(
        1,
        "Answer HTTP with this many processes; use more processes for many concurrent streams.",
        "-asc",
        also="--tokenizer-worker-num",
        least=1,
        most=MAX_API_SERVERS,
    )
    served_model_name: tuple[str, ...] = option(
        (), "Set the model's name in the API; may be repeated (default: the given MODEL)."
    )
    stream_interval: int = option(
        1, "Send one stream event per this many tokens; larger numbers save CPU time.", least=1
    )
    sse_keep_alive_interval: float = option(
        15.0,
        "Send a comment if a stream has no output for this many seconds; 0 sends no comments.",
        least=0,
        is_seconds=True,
    )

    chat_template: str | None = optional(
        "Replace the checkpoint's chat template with this Jinja file.", panel=FORMAT
    )
    default_chat_template_kwargs: dict[str, Any] = option(
        {}, "Set chat template variables for requests that do not set them.", is_json=True
    )
    allow_special_tokens_in_text: bool = option(
        False, "Encode control tokens in messages as tokens instead of text (trusted clients only)."
    )
    compact_json: bool = option(
        False, "Omit white space from structured JSON output, unless a request allows white space."
    )
    # The command adds the choices of the two parser options, which the model families define.
    tool_call_parser: str = option(
        "auto", "Parse tool calls in this format; auto selects the format of the model."
    )
    reasoning_parser: str = option(
        "auto", "Choose how thinking is parsed; auto returns thinking separately from the content."
    )

    image_resize_rule: str = option(
        "longest",
        "Choose the limit for resizing images. longest limits the longest side, as MiniMax's API "
        "does. area limits the number of pixels, as transformers and vLLM do.",
        choices=RULES,
    )

    api_keys: tuple[str, ...] = option(
        (),
        "Require this API key from clients; may be repeated (default: no key). Prefer "
        "NEGAMAX_API_KEY or --api-key-file, because the process list shows this option.",
        "--api-key",
        adds_up=True,
        panel=SECURITY,
    )
    api_key_file: str | None = optional("Read more API keys from this file, one key per line.")
    admin_api_key: str | None = optional(
        "Set a key for all routes, including routes that act on the requests of all users. "
        "Prefer NEGAMAX_ADMIN_API_KEY, because the process list shows this option."
    )
    allow_unauthenticated: bool = option(False, "Let other machines connect without an API key.")
    allowed_origins: tuple[str, ...] = option(
        (),
        "Let web pages of this origin use the server (CORS); repeatable; '*' allows all origins.",
        takes_json_list=True,
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Accept this Host header if no API key is set; repeatable; '*' accepts all Host headers.",
        takes_json_list=True,
    )
    allowed_media_domains: tuple[str, ...] = option(
        (),
        "Let requests load images from http(s) URLs of this host; may be repeated (default: the "
        "server opens no URLs).",
        takes_json_list=True,
    )
    forwarded_allow_ips: tuple[str, ...] = option(
        (),
        "Trust the X-Forwarded-For header of a proxy with this address or in this network; may be "
        "repeated (default: trust no proxy).",
    )
    ssl_certfile: str | None = optional("Serve TLS with the certificate chain in this PEM file.")
    ssl_keyfile: str | None = optional("Use the private key in this PEM file for TLS.")

    scheduling_policy: str = option(
        "fcfs",
        "Order waiting requests by arrival (fcfs), or by priority and then by arrival (priority).",
        choices=SCHEDULING_POLICIES,
        panel=LIMITS,
    )
    max_body_bytes: int | None = optional(
        "Limit the size of a request body, such as 32MiB (default: 32 MiB, or 64 MiB for models "
        "that read images).",
        least=1024,
        is_size=True,
    )
    max_connections_per_address: int | None = optional(
        "Limit the connections of one client address to one server process (default: half of the "
        "connections that the process accepts).",
        least=1,
    )
    request_timeout: float | None = optional(
        "Abort a request after this many seconds; requests can set fewer (default: no limit).",
        is_seconds=True,
    )
    slow_client_timeout: float = option(
        60.0, "Disconnect clients that read nothing for this many seconds.", is_seconds=True
    )
    drain_timeout: float = option(
        30.0, "After SIGTERM, give requests this many seconds to finish.", least=0, is_seconds=True
    )
    max_engine_restarts: int = option(
        3,
        "Restart a dead engine at most this many times in --engine-restart-window. If an engine "
        "exceeds this limit, the server exits, unless another replica runs.",
        least=0,
    )
    engine_restart_window: float = option(
        600.0, "Count engine restarts over this many seconds.", is_seconds=True
    )
    engine_hang_timeout: float = option(
        300.0,
        "Replace an engine that has requests to run but completes no step for this many seconds.",
        also="--watchdog-timeout",
        is_seconds=True,
    )

    enable_log_requests: bool = option(
        False,
        "Log each request with its prompt, sampling parameters, finish reason and times.",
        also="--log-requests",
        panel=LOGS,
    )
    max_log_len: int = option(256, "Log at most this many characters of a prompt.", least=0)
    enable_access_log: bool = option(False, "Log each HTTP request.")
    log_stats: bool = option(
        True, "Disable the regular log line about the load of an engine.", "--disable-log-stats"
    )
    log_stats_interval: float = option(
        10.0, "Set the seconds between two log lines that show the load.", is_seconds=True
    )
    otlp_traces_endpoint: str | None = optional(
        "Send a trace span per request to this OpenTelemetry collector over HTTP."
    )

    profile_dir: str | None = optional(
        "Let /start_profile and /stop_profile write traces of the steps to this folder (default: "
        "refuse both routes)."
    )

    def body_bytes(self, *, has_images: bool) -> int:
        """Return the size limit of a request body. `has_images`: whether the model reads images."""
        return self.max_body_bytes or (64 if has_images else 32) * 2**20

    def __post_init__(self) -> None:
        check_options(self)
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            missing = "--ssl-keyfile" if self.ssl_keyfile is None else "--ssl-certfile"
            raise ConfigError(
                f"{missing} is missing; TLS needs a certificate and a key", hint=f"add {missing}"
            )
        for given in self.forwarded_allow_ips:
            try:
                ipaddress.ip_network(given)
            except ValueError as error:
                raise ConfigError(
                    f"--forwarded-allow-ips is {given!r}: {error}",
                    hint="give the proxy's address or network, such as 127.0.0.1 or 10.0.0.0/8",
                ) from None
        keys = self.api_keys if self.admin_api_key is None else (*self.api_keys, self.admin_api_key)
        check_keys(keys)
        if self.admin_api_key is not None and self.admin_api_key in self.api_keys:
            refusal = "--admin-api-key equals one of the API keys, so clients could use its routes"
            raise ConfigError(refusal, hint="use a different key for --admin-api-key")
