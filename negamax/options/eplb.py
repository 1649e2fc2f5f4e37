"""Settings for moving experts between ranks, with the keys of vLLM's `--eplb-config`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from negamax.options.flags import check_keys, refuse_key

IN_ORDER = "trivial"  # default of --init-expert-location: experts in the order of their index
RECORDER_MODES = ("off", "stat")
# FIXED: experts stay on their ranks. COUNTED: the engine also counts selections. MOVED: EPLB is on.
FIXED, COUNTED, MOVED = "fixed", "counted", "moved"
_FLAG = "--eplb-config"
_refuse = partial(refuse_key, _FLAG)
# keys of vLLM's option that are accepted but have no effect
_WITHOUT_EFFECT = {
    "use_async", "communicator", "enable_migration_batching", "log_balancedness_interval",
}  # fmt: skip


@dataclass(frozen=True)
class EplbConfig:
    """Settings that decide when experts move between ranks. `read` raises `ConfigError`."""

    window_size: int = 1000  # Number of latest steps whose expert selections a rebalance uses.
    step_interval: int = 3000  # Steps between two rebalances.
    num_redundant_experts: int = 0  # Number of extra expert copies in each layer, over all ranks.
    log_balancedness: bool = False
    # as in SGLang, experts move only if the mean rank load / largest rank load is at most this
    min_rebalancing_utilization_threshold: float = 1.0

    @staticmethod
    def read(given: Mapping[str, Any]) -> "EplbConfig":
        """Read the JSON object of `--eplb-config`."""
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
