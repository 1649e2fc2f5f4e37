"""Check options whose values are JSON objects against the tables of json_options.toml."""

from collections.abc import Mapping
from typing import Any, NoReturn

from negamax.base.errors import ConfigError
from negamax.base.tables import read_table
from negamax.options.flags import Flag, check_keys

_TABLES = read_table(__file__)
_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "boolean": ((bool,), "true or false"),
    "integer": ((int,), "a whole number"),
    "number": ((int, float), "a number"),
    "object": ((dict,), "a JSON object"),
    "text": ((str,), "a non-empty string"),
}


def rules_of(option: str) -> dict[str, dict[str, Any]]:
    """Return the rules of each key that Negamax reads."""
    rules: dict[str, dict[str, Any]] = _TABLES[option]["keys"]
    return rules


def check_json(option: str, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Check the keys and values of an option. Return log lines about keys that have no effect.
    Raises `ConfigError`.
    """
    table, rules = _TABLES[option], rules_of(option)
    reasons = table.get("reasons", {})
    check_keys(option, given, rules, also=(*table.get("ignored", "").split(), *reasons))
    for key, value in given.items():
        _check_value(option, key, value, rules.get(key, {}))
    return tuple(
        f"{option}: {key} has no effect: {reasons[key]}" for key in given if key in reasons
    )


def _check_value(option: str, key: str, value: Any, rule: Mapping[str, Any]) -> None:
    if "values" in rule and value not in rule["values"]:
        refuse_key(option, key, value, ", ".join(rule["values"]))
    if "type" in rule:
        types, allowed = _TYPES[rule["type"]]
        limits = Flag(least=rule.get("least"), most=rule.get("most"), above=rule.get("above"))
        is_valid = type(value) in types and value != ""
        if limits.has_limits:
            allowed = f"{allowed}, {limits.limits}"
            is_valid = is_valid and limits.allows(value)
        if not is_valid:
            refuse_key(option, key, value, allowed)


def refuse_key(
    option: str, key: str, value: object, allowed: str, hint: str | None = None
) -> NoReturn:
    """Raise `ConfigError` for an invalid value of a key."""
    raise ConfigError(f"{option}: {key} is {repr(value)[:80]}; allowed: {allowed}", hint=hint)
