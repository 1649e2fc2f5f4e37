"""Settings for moving experts between ranks, with the keys of vLLM's `--eplb-config`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from negamax.base.errors import ConfigError
from negamax.options.flags import check_keys

IN_ORDER = "trivial"  # of --init-expert-location
RECORDER_MODES = ("off", "stat")
# Experts stay where they are; their selections are counted; they move between ranks, too.
FIXED, COUNTED, MOVED = "fixed", "counted", "moved"
_FLAG = "--eplb-config"
# Keys of vLLM that ask for what is always so.
_WITHOUT_EFFECT = {
    "use_async", "communicator", "enable_migration_batching", "log_balancedness_interval",
}  # fmt: skip


@dataclass(frozen=True)
class EplbConfig:
    """When experts move, in steps since the start. Errors of `read`: `ConfigError`."""

    window_size: int = 1000  # steps whose selections count
    step_interval: int = 3000  # steps between two rebalances
    # slots for copies of experts in each layer, over all ranks
    num_redundant_experts: int = 0
    log_balancedness: bool = False
    # SGLang's: nothing moves above this balancedness
    min_rebalancing_utilization_threshold: float = 1.0

    @staticmethod
    def read(given: Mapping[str, Any]) -> "EplbConfig":
        """Read the keys of the option."""
        known = {field.name for field in fields(EplbConfig)}
        check_keys(_FLAG, given, known, also=_WITHOUT_EFFECT | {"policy"})
        if given.get("policy", "default") != "default":
            _refuse("policy", given["policy"], "default")
        for key, least in (("window_size", 1), ("step_interval", 1), ("num_redundant_experts", 0)):
            value = given.get(key, least)
            if type(value) is not int or value < least:
                _refuse(key, value, f"a whole number, {least} or more")
        if type(given.get("log_balancedness", False)) is not bool:
            _refuse("log_balancedness", given["log_balancedness"], "true or false")
        threshold = given.get("min_rebalancing_utilization_threshold", 1.0)
        is_number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
        if not is_number or not 0 < threshold <= 1:
            _refuse("min_rebalancing_utilization_threshold", threshold, "above 0, at most 1")
        return EplbConfig(**{key: value for key, value in given.items() if key in known})


def _refuse(key: str, value: object, allowed: str) -> NoReturn:
    raise ConfigError(f"{_FLAG}: {key} is {repr(value)[:80]}; allowed: {allowed}")
