"""Options of `negamax route`."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from negamax.base import log
from negamax.base.errors import ConfigError
from negamax.options.flags import check_options, option
from negamax.options.kv_events import is_endpoint

MAX_SERVERS = 64  # servers are limited, because the router stores a table of prefixes per server.
# `_BOOTSTRAP_PORT`: "none" stands for a missing port, as in sglang-router.
_BOOTSTRAP_PORT = re.compile(r"[1-9][0-9]{0,4}|none")


@dataclass(frozen=True, kw_only=True)
class RouteOptions:
    """Options of the router. Times are in seconds."""

    prefill: tuple[str, ...] = option(
        (),
        "Let the server at this URL prefill prompts for the --decode servers; may be repeated. "
        "With --pd-disaggregation, you may write the server's kv_port after the URL.",
        panel="Servers",
    )
    decode: tuple[str, ...] = option(
        (), "Generate the answers to prefilled prompts on the server at this URL; may be repeated."
    )
    pd_disaggregation: bool = option(
        False,
        "Send requests to the --prefill and --decode servers by SGLang's protocol "
        "(bootstrap_room), not by vLLM's protocol (kv_transfer_params).",
    )
    kv_event_source: tuple[str, ...] = option(
        (),
        "Read the KV events of a Negamax server (URL=ENDPOINT), so that each prompt goes to a "
        "server that has cached the prompt; may be repeated. Separate the endpoints of several "
        "data-parallel ranks by commas.",
    )
    kv_event_replay_source: tuple[str, ...] = option(
        (),
        "Request missed KV events from this replay endpoint of a server (URL=ENDPOINT); give one "
        "replay endpoint for each endpoint of --kv-event-source; may be repeated.",
    )
    health_interval: float = option(
        1.0, "Set the interval between health checks of a server, in seconds.", is_seconds=True
    )
    host: str = option("127.0.0.1", "Listen on this address.", panel="Router")
    port: int = option(8080, "Listen on this port; 0 picks a free port.", least=0, most=65535)
    allow_unauthenticated: bool = option(
        False, "Accept connections from other machines; the router does not check API keys."
    )
    max_body_bytes: int = option(
        32 * 2**20, "Limit the size of a request body, such as 32MiB.", least=1024, is_size=True
    )
    log_level: str = option("info", "Log messages of this level and above.", choices=log.LEVELS)

    def __post_init__(self) -> None:
        check_options(self)


def list_servers(
    urls: tuple[str, ...], options: RouteOptions
) -> tuple[list[SplitResult], list[SplitResult]]:
    """Return (servers that answer requests, servers that only prefill). Raises `ConfigError`."""
    if urls and (options.prefill or options.decode):
        refusal = f"URL {urls[0]!r} cannot be combined with --prefill or --decode"
        raise ConfigError(refusal, hint="give either URLs, or --prefill and --decode")
    if bool(options.prefill) != bool(options.decode):
        missing = "--decode" if options.prefill else "--prefill"
        raise ConfigError(f"{missing} is missing", hint="give --prefill and --decode, or only URLs")
    if options.pd_disaggregation and not options.prefill:
        refusal = "--pd-disaggregation has no servers"
        raise ConfigError(refusal, hint="add --prefill URL [KV_PORT] and --decode URL")
    if not urls and not options.decode:
        raise ConfigError("URL is missing", hint="give URLs such as http://127.0.0.1:8000")
    name = "URL" if urls else "--decode"
    servers = [_parse_url(name, url) for url in urls or options.decode]
    prefillers = [url for url, _ in list_prefillers(options)]
    found = [part.geturl() for part in (*servers, *prefillers)]
    for url in found:
        if found.count(url) > 1:
            raise ConfigError(f"the server {url} is given twice", hint="give each server once")
    if len(found) > MAX_SERVERS:
        refusal = f"there are {len(found)} servers; allowed: {MAX_SERVERS}"
        raise ConfigError(refusal, hint="use several routers, and one router for these routers")
    return servers, prefillers


def list_prefillers(options: RouteOptions) -> list[tuple[SplitResult, int | None]]:
    """Return each URL of --prefill and the port given after the URL. Raises `ConfigError`."""
    found, has_url = list[tuple[SplitResult, int | None]](), False
    for word in options.prefill:
        is_port = _BOOTSTRAP_PORT.fullmatch(word) is not None
        if not is_port:
            found.append((_parse_url("--prefill", word), None))
        elif has_url and options.pd_disaggregation and (word == "none" or int(word) < 65536):
            found[-1] = (found[-1][0], None if word == "none" else int(word))
        else:
            refusal = f"--prefill has the value {word!r}; allowed: URLs, and with "
            refusal += "--pd-disaggregation a port (1 to 65535) or 'none' after a URL"
            raise ConfigError(refusal, hint="write --pd-disaggregation --prefill URL KV_PORT")
        has_url = not is_port
    return found


@dataclass(frozen=True, slots=True)
class EventAddress:
    """The ZeroMQ addresses at which a rank of a server publishes KV events."""

    endpoint: str
    replay_endpoint: str | None


def list_event_addresses(
    options: RouteOptions, servers: Sequence[SplitResult]
) -> dict[str, list[EventAddress]]:
    """Return the KV event addresses of each server, by the server's URL. Raises `ConfigError`."""
    urls = {server.geturl() for server in servers}
    sources = _read_sources("--kv-event-source", options.kv_event_source, urls)
    replays = _read_sources("--kv-event-replay-source", options.kv_event_replay_source, urls)
    for url, endpoints in replays.items():
        if len(endpoints) != len(sources.get(url, ())):
            refusal = f"--kv-event-replay-source has {len(endpoints)} addresses of {url}, and "
            refusal += f"--kv-event-source has {len(sources.get(url, ()))}"
            raise ConfigError(refusal, hint="give one replay address per --kv-event-source address")
    return {
        url: list(map(EventAddress, endpoints, replays.get(url, [None] * len(endpoints))))
        for url, endpoints in sources.items()
    }


def _read_sources(
    name: str, values: tuple[str, ...], urls: Collection[str]
) -> dict[str, list[str]]:
    """Return the addresses that the option `name` gives for each server, by URL."""
    found: dict[str, list[str]] = {}
    for value in values:
        given, _, addresses = value.partition("=")
        url = _parse_url(name, given).geturl()
        if url not in urls or url in found:
            problem = "is given twice" if url in found else "is not a server of this router"
            raise ConfigError(f"{name}: {url} {problem}", hint="give each URL once")
        found[url] = addresses.split(",")
        for address in found[url]:
            if not is_endpoint(address):
                raise ConfigError(
                    f"{name} has the invalid address {address[:100]!r}",
                    hint="give URL=tcp://HOST:PORT or URL=ipc://PATH",
                )
    return found


def _parse_url(name: str, url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.port != 0
    except ValueError:
        is_address = False
    if not (is_address and parts.hostname) or parts.username or parts.query or parts.fragment:
        raise ConfigError(
            f"{name} is {url[:100]!r}, which is not the URL of a server",
            hint="give http://HOST:PORT or https://HOST:PORT",
        )
    return parts._replace(path=parts.path.rstrip("/").removesuffix("/v1"))
