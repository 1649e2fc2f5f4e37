"""Options and GPUs of each of several replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from negamax.base import log
from negamax.base.errors import ConfigError
from negamax.engine.wire import ModelInfo
from negamax.options.engine import EngineOptions
from negamax.parallel.layout import ParallelLayout
from negamax.planner.gpus import visible_devices

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def make_replica_options(options: EngineOptions) -> list[tuple[EngineOptions, Mapping[str, str]]]:
    """For each replica its options and environment variables: the number in its log lines, and its
    share of the GPUs that this process sees. Errors: `ConfigError` for too few GPUs.
    """
    count = options.num_replicas
    if count == 1:
        return [(options, {})]
    # one replica's progress is enough
    quiet = dataclasses.replace(options, show_progress=False)
    each = [options, *[quiet] * (count - 1)]
    return [
        (one, {log.CHILD_VARIABLE: log.settings(replica)} | visible)
        for replica, (one, visible) in enumerate(zip(each, _divide_gpus(options), strict=True))
    ]


def _divide_gpus(options: EngineOptions) -> list[dict[str, str]]:
    """The variable that shows each replica its own GPUs, if there are any."""
    count, num_ranks = options.num_replicas, ParallelLayout.of(options.parallel).world_size
    devices = [] if options.device == "cpu" or options.script else visible_devices()
    if devices == []:
        return [{}] * count
    needed = num_ranks * count
    if devices is None:  # missing GPUs are refused later
        devices = [str(number) for number in range(needed)]
    if len(devices) < needed:
        raise ConfigError(
            f"--num-replicas is {count}, of {num_ranks} GPUs each; {len(devices)} are available",
            hint=f"use --num-replicas {max(1, len(devices) // num_ranks)}"
            + (", or --device cpu" if len(devices) < num_ranks else ""),
        )
    return [
        {_VISIBLE: ",".join(devices[first : first + num_ranks])}
        for first in range(0, needed, num_ranks)
    ]


def check_same_device(infos: Sequence[ModelInfo | None]) -> None:
    """Refuse replicas of which only some found a GPU. Errors: `ConfigError`."""
    kinds = [info.device.partition(":")[0] for info in infos if info is not None]
    if len(set(kinds)) > 1:
        raise ConfigError(
            f"--num-replicas is {len(kinds)}, and the replicas run on {', '.join(kinds)}: there "
            "are too few GPUs",
            hint="use fewer replicas, or --device",
        )
