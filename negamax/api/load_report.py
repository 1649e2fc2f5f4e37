"""Log the load of a busy server at intervals."""

import asyncio
import time

from negamax.base.log import get_logger
from negamax.engine.client.engine_client import AsyncEngine
from negamax.engine.wire import EngineStats, RankStats

logger = get_logger(__name__)


def compute_cache_usage(stats: RankStats) -> float:
    """Return the fraction of KV blocks in use, 0 to 1."""
    total = stats.num_kv_blocks
    return 1.0 - stats.num_free_kv_blocks / total if total else 0.0


class LoadReport:
    """Compares two readings of an engine's statistics. Only the event loop changes this object."""

    def __init__(self, stats: EngineStats, *, now: float) -> None:
        """`now` is in monotonic seconds."""
        self._stats = stats
        self._time = now
        self.hit_rate = 0.0  # Prefix cache hit rate of the latest prompts.

    def next(self, stats: EngineStats, *, now: float) -> dict[str, float] | None:
        """Return the engine's load since the previous call, or None for an idle engine.

        Cache usage and hit rate are between 0 and 1. Prefill tokens exclude cached prompt tokens.
        """
        before, seconds = self._stats, now - self._time
        self._stats, self._time = stats, now
        if stats.step_count == before.step_count and not stats.num_running + stats.num_waiting:
            return None
        prompt_tokens = stats.prompt_tokens - before.prompt_tokens
        if prompt_tokens:
            cached = stats.cached_prompt_tokens - before.cached_prompt_tokens
            self.hit_rate = cached / prompt_tokens
        return {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "kv_cache_usage": compute_cache_usage(stats),
            "prefill_tokens_per_s": (stats.prefill_tokens - before.prefill_tokens) / seconds,
            "decode_tokens_per_s": (stats.generated_tokens - before.generated_tokens) / seconds,
            "prefix_cache_hit_rate": self.hit_rate,
        }


async def log_load(engine: AsyncEngine, *, interval: float) -> None:
    """Log the load of a busy engine every `interval` seconds, until cancelled."""
    report = LoadReport(engine.stats, now=time.monotonic())
    while True:
        await asyncio.sleep(interval)
        load = report.next(engine.stats, now=time.monotonic())
        if load is not None:
            logger.info(
                "%d running, %d waiting, KV cache %.1f %%, prefill %.1f tokens/s,"
                " decode %.1f tokens/s, prefix cache hit rate %.1f %%",
                load["running"],
                load["waiting"],
                100 * load["kv_cache_usage"],
                load["prefill_tokens_per_s"],
                load["decode_tokens_per_s"],
                100 * load["prefix_cache_hit_rate"],
                extra={"fields": {name: round(value, 4) for name, value in load.items()}},
            )
