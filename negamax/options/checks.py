"""Checks of option values; every error names the flag, the value and the limit."""

from __future__ import annotations

from negamax.base.errors import ConfigError


def flag_of(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def check_choices(options: object, **allowed: tuple[str, ...]) -> None:
    for name, values in allowed.items():
        if getattr(options, name) not in values:
            raise ConfigError(
                f"{flag_of(name)} is {getattr(options, name)!r}; allowed: {', '.join(values)}"
            )


def check_least(options: object, **least: int) -> None:
    """The least values of whole numbers, where they are given."""
    for name, low in least.items():
        value = getattr(options, name)
        if value is not None and value < low:
            raise ConfigError(f"{flag_of(name)} is {value}; allowed: {low} or more")


def check_within(flag: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise ConfigError(f"{flag} is {value}; allowed: {low} to {high}")
