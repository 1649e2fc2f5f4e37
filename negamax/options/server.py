"""The HTTP server's options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from negamax.base.errors import ConfigError
from negamax.options.checks import check_choices, check_least, flag_of
from negamax.options.key_file import check_keys

MAX_API_SERVERS = 64
SCHEDULING_POLICIES = ("fcfs", "priority")


@dataclass(frozen=True)
class ServerOptions:
    """How the HTTP server answers. Times are in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    node_health_port: int | None = None  # of nodes without the API, for probes; None: none
    api_server_count: int = 1  # processes that answer HTTP, in front of the same engines
    served_model_name: tuple[str, ...] = ()  # default: the model's own name
    api_keys: tuple[str, ...] = ()  # any of them opens every route; none: no key is asked for
    api_key_file: str | None = None  # of further ones, one per line
    # opens every route, and alone those that act on the requests of all
    admin_api_key: str | None = None
    allow_unauthenticated: bool = False  # listen on more than this machine without a key
    allowed_origins: tuple[str, ...] = ()  # of web pages that may call the server (CORS); "*": all
    # further names in the Host header, where no key is asked for; "*": all
    allowed_hosts: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    chat_template: str | None = None  # file that replaces the checkpoint's template
    # for requests that do not set them
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    allow_special_tokens_in_text: bool = False  # what a conversation says may become control tokens
    tool_call_parser: str = "auto"  # names: models/<family>/chat.py
    reasoning_parser: str = "auto"
    scheduling_policy: str = "fcfs"  # "priority": requests may say how urgent they are
    max_body_bytes: int = 32 * 2**20
    # of one server process; default: half of all it may have
    max_connections_per_address: int | None = None
    # from arrival to the last token; a request may ask for less
    request_timeout: float | None = None
    drain_timeout: float = 30.0  # that open requests get after SIGTERM
    # a client that does not read what is sent is cut off after this
    slow_client_timeout: float = 60.0
    # tokens of a stream that are sent together; a request may ask for another number
    stream_interval: int = 1
    # of comments in a stream that has nothing to say; 0: none
    sse_keep_alive_interval: float = 15.0
    # of one engine within engine_restart_window; after that it stays dead, and the server ends
    # unless another one is left
    max_engine_restarts: int = 3
    engine_restart_window: float = 600.0
    engine_hang_timeout: float = 300.0  # that the engine's loop may stand still while there is work
    enable_log_requests: bool = False  # a line when a request begins and one when it ends
    max_log_len: int = 256  # characters of a prompt in these lines
    enable_access_log: bool = False  # a line per HTTP request
    log_stats: bool = True  # a line every log_stats_interval while the engine is busy
    log_stats_interval: float = 10.0
    otlp_traces_endpoint: str | None = None  # of an OpenTelemetry collector, OTLP over HTTP

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; allowed: 0 to 65535 (0 picks a free one)")
        if self.node_health_port is not None and not 0 <= self.node_health_port <= 65535:
            raise ConfigError(
                f"--node-health-port is {self.node_health_port}; allowed: 0 to 65535 (0 picks a "
                f"free one)"
            )
        if not 1 <= self.api_server_count <= MAX_API_SERVERS:
            raise ConfigError(
                f"--api-server-count is {self.api_server_count}; allowed: 1 to {MAX_API_SERVERS}"
            )
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            missing = "--ssl-keyfile" if self.ssl_keyfile is None else "--ssl-certfile"
            raise ConfigError(
                f"{missing} is missing; TLS needs a certificate and its key", hint=f"add {missing}"
            )
        keys = self.api_keys if self.admin_api_key is None else (*self.api_keys, self.admin_api_key)
        check_keys(keys)
        if self.admin_api_key is not None and self.admin_api_key in self.api_keys:
            raise ConfigError(
                "--admin-api-key is one of the API keys, which are for everybody else",
                hint="give a key of its own",
            )
        check_choices(self, scheduling_policy=SCHEDULING_POLICIES)
        check_least(
            self,
            max_body_bytes=1024,
            max_connections_per_address=1,
            max_engine_restarts=0,
            stream_interval=1,
            max_log_len=0,
        )
        for name in (
            "log_stats_interval", "request_timeout", "slow_client_timeout", "engine_restart_window",
            "engine_hang_timeout",
        ):  # fmt: skip
            seconds = getattr(self, name)
            # NaN fails the comparison and is refused
            if seconds is not None and not 0.0 < seconds < float("inf"):
                raise ConfigError(f"{flag_of(name)} is {seconds}; allowed: seconds above 0")
        for name in ("sse_keep_alive_interval", "drain_timeout"):
            seconds = getattr(self, name)
            if not 0.0 <= seconds < float("inf"):
                raise ConfigError(f"{flag_of(name)} is {seconds}; allowed: 0 seconds or more")
