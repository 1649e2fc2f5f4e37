"""A file of API keys."""

from pathlib import Path

from negamax.base.errors import ConfigError


def keys_of_file(path: str | None) -> tuple[str, ...]:
    """Read one key per line; skip empty lines and comments (#). Raises `ConfigError`."""
    if path is None:
        return ()
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--api-key-file is {path!r}, which cannot be read: {reason}") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file {path!r} contains no key", hint="write one key per line")
    check_keys(keys)
    return keys


def check_keys(keys: tuple[str, ...]) -> None:
    """Refuse keys that cannot be sent in an HTTP header. Raises `ConfigError`."""
    if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in keys):
        refusal = "an API key is empty or has characters that an HTTP header cannot contain"
        raise ConfigError(f"{refusal}; allowed: printable ASCII without spaces")
