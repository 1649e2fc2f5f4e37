"""The HTTP server's options."""

import ipaddress
from dataclasses import dataclass
from typing import Any

from negamax.base.errors import ConfigError
from negamax.options.engine import LOGS
from negamax.options.flags import check_options, option
from negamax.options.key_file import check_keys

MAX_API_SERVERS = 64
RULES = ("longest", "area")  # of resizing images
SCHEDULING_POLICIES = ("fcfs", "priority")
SERVER, FORMAT, SECURITY, LIMITS = "Server", "Chat format", "Access", "Limits and supervision"


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of the HTTP server. Times are in seconds."""

    host: str = option("127.0.0.1", "Listen on this address.", panel=SERVER)
    port: int = option(8000, "Listen on this port; 0 picks a free one.", least=0, most=65535)
    node_health_port: int | None = option(
        None,
        "Answer /livez, /readyz and /health on this port of --host, on nodes other than 0. "
        "Default: no port.",
        least=0,
        most=65535,
    )
    api_server_count: int = option(
        1,
        "Answer HTTP with this many processes. Raise it for many streams.",
        "-asc",
        also="--tokenizer-worker-num",
        least=1,
        most=MAX_API_SERVERS,
    )
    served_model_name: tuple[str, ...] = option(
        (), "Set the model's name in the API; may be repeated. Default: its own name."
    )
    stream_interval: int = option(
        1,
        "Send this many tokens of a stream together; requests may override it. Raise it to save "
        "CPU time.",
        least=1,
    )
    sse_keep_alive_interval: float = option(
        15.0,
        "Send a comment after this many seconds of silence in a stream; 0: send none.",
        least=0,
        is_seconds=True,
    )

    chat_template: str | None = option(
        None, "Replace the checkpoint's chat template with this Jinja file.", panel=FORMAT
    )
    default_chat_template_kwargs: dict[str, Any] = option(
        {}, "Set template variables of requests that do not set them.", is_json=True
    )
    allow_special_tokens_in_text: bool = option(
        False,
        "Encode control tokens spelled in messages as control tokens. Only for clients you trust.",
    )
    compact_json: bool = option(
        False,
        "Write structured output without white space between JSON parts. Requests may override it.",
    )
    # the model families define the choices of the next two: the command adds them
    tool_call_parser: str = option("auto", "Parse tool calls in this format; auto: the model's.")
    reasoning_parser: str = option(
        "auto", "Choose where thinking goes; auto: apart from the content."
    )

    image_resize_rule: str = option(
        "longest",
        "Resize images to a longest side, as MiniMax's API, or to an area, as transformers and "
        "vLLM do.",
        choices=RULES,
    )

    api_keys: tuple[str, ...] = option(
        (),
        "Require this key of requests; may be repeated. Prefer NEGAMAX_API_KEY or --api-key-file. "
        "Default: no key.",
        "--api-key",
        adds_up=True,
        panel=SECURITY,
    )
    api_key_file: str | None = option(None, "Read further keys from this file, one per line.")
    admin_api_key: str | None = option(
        None,
        "Set a key that opens every route; routes that act on all users' requests need it. "
        "Prefer NEGAMAX_ADMIN_API_KEY.",
    )
    allow_unauthenticated: bool = option(False, "Listen beyond this machine without a key.")
    allowed_origins: tuple[str, ...] = option(
        (),
        "Let pages of this web origin call the server (CORS); may be repeated, '*' is all.",
        takes_json_list=True,
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Accept this name in the Host header where no key is set; may be repeated, '*' is all.",
        takes_json_list=True,
    )
    allowed_media_domains: tuple[str, ...] = option(
        (),
        "Let requests load images from http(s) URLs of this host; may be repeated. Default: the "
        "server opens no URLs.",
        takes_json_list=True,
    )
    forwarded_allow_ips: tuple[str, ...] = option(
        (),
        "Take the client's address from X-Forwarded-For of this proxy, an address or a network; "
        "may be repeated. Default: of none.",
    )
    ssl_certfile: str | None = option(None, "Serve TLS with this certificate (chain), PEM.")
    ssl_keyfile: str | None = option(None, "Use this private key for TLS, PEM.")

    scheduling_policy: str = option(
        "fcfs",
        "Order waiting requests; priority: by their priority, then by arrival.",
        choices=SCHEDULING_POLICIES,
        panel=LIMITS,
    )
    max_body_bytes: int | None = option(
        None,
        "Limit the size of a request body, such as 32MiB. Default: 32 MiB, 64 MiB if it reads "
        "images.",
        least=1024,
        is_size=True,
    )
    max_connections_per_address: int | None = option(
        None,
        "Limit the connections of one client address to one server process. Default: half of the "
        "process's limit.",
        least=1,
    )
    request_timeout: float | None = option(
        None,
        "Abort a request after this many seconds; requests may ask for less. Default: no limit.",
        above=0,
        is_seconds=True,
    )
    slow_client_timeout: float = option(
        60.0, "Disconnect clients that read nothing for so many seconds.", above=0, is_seconds=True
    )
    drain_timeout: float = option(
        30.0, "Let requests finish for this many seconds after SIGTERM.", least=0, is_seconds=True
    )
    max_engine_restarts: int = option(
        3,
        "Limit the restarts of a dead engine within --engine-restart-window. After that the server "
        "ends, unless another replica is left.",
        least=0,
    )
    engine_restart_window: float = option(
        600.0, "Set the period in which restarts are counted.", above=0, is_seconds=True
    )
    engine_hang_timeout: float = option(
        300.0,
        "Replace a busy engine that completes no step for this many seconds.",
        also="--watchdog-timeout",
        above=0,
        is_seconds=True,
    )

    enable_log_requests: bool = option(
        False, "Log each request: prompt, sampling, end, times.", also="--log-requests", panel=LOGS
    )
    max_log_len: int = option(256, "Log at most this many characters of a prompt.", least=0)
    enable_access_log: bool = option(False, "Log each HTTP request.")
    log_stats: bool = option(
        True, "Disable the log line with a busy engine's load.", "--disable-log-stats"
    )
    log_stats_interval: float = option(
        10.0, "Log the load every so many seconds.", above=0, is_seconds=True
    )
    otlp_traces_endpoint: str | None = option(
        None, "Send a span per request to this OpenTelemetry collector (HTTP)."
    )

    def body_bytes(self, *, has_images: bool) -> int:
        """The most bytes of a request body; `has_images`: of a server that reads images."""
        return self.max_body_bytes or (64 if has_images else 32) * 2**20

    def __post_init__(self) -> None:
        check_options(self)
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            missing = "--ssl-keyfile" if self.ssl_keyfile is None else "--ssl-certfile"
            raise ConfigError(
                f"{missing} is missing; TLS needs a certificate and its key", hint=f"add {missing}"
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
            refusal = "--admin-api-key is one of the API keys, which are for everybody else"
            raise ConfigError(refusal, hint="give a key of its own")
