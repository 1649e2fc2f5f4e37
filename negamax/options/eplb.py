"""Settings for moving experts between ranks, with the keys of vLLM's `--eplb-config`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from negamax.options.json_options import check_json

IN_ORDER = "trivial"  # default of --init-expert-location: experts in the order of their index
RECORDER_MODES = ("off", "stat")
# FIXED: experts stay on their ranks. COUNTED: the engine also counts selections. MOVED: EPLB is on.
FIXED, COUNTED, MOVED = "fixed", "counted", "moved"


@dataclass(frozen=True)
class EplbConfig:
    """Settings that decide when experts move between ranks. `read` raises `ConfigError`."""

    window_size: int = 1000  # Number of latest steps whose expert selections a rebalance uses.
    step_interval: int = 3000  # Steps between two rebalances.
    num_redundant_experts: int = 0  # Number of extra expert copies in each layer, over all ranks.
    log_balancedness: bool = False
    # as in SGLang, experts move only if mean rank load / largest rank load <= this threshold
    min_rebalancing_utilization_threshold: float = 1.0

    @staticmethod
    def read(given: Mapping[str, Any]) -> "EplbConfig":
        """Read the JSON object of `--eplb-config`."""
        check_json("--eplb-config", given)
        known = {field.name for field in fields(EplbConfig)}
        return EplbConfig(**{key: value for key, value in given.items() if key in known})
