"""Values of options as vLLM and SGLang call them."""

from __future__ import annotations

from collections.abc import Mapping

# By option: the values of others, and ours.
_VALUES: Mapping[str, Mapping[str, str]] = {
    "dtype": {
        "half": "float16",
        "float": "float32",
        "fp16": "float16",
        "bf16": "bfloat16",
        "fp32": "float32",
    },
    "load_format": {
        "dummy": "synthetic",
        **dict.fromkeys(("hf", "fastsafetensors", "runai_streamer"), "safetensors"),
        **dict.fromkeys(("instanttensor", "layered"), "safetensors"),
    },
    "expert_distribution_recorder_mode": {"None": "off", "stat_approx": "stat"},
    "kv_cache_dtype": {"bf16": "bfloat16", "fp16": "float16"},
    "index_cache_dtype": {"bf16": "bfloat16", "fp16": "float16"},
    "max_model_len": {"-1": "auto", "None": "auto"},
    "all2all_backend": {
        "flashinfer_nvlink_one_sided": "one_sided",
        **dict.fromkeys(
            (
                *("naive", "pplx", "nixl_ep", "moonep", "passthrough", "deepep_v2"),
                *("deepep_high_throughput", "deepep_low_latency", "flashinfer_nvlink_two_sided"),
                *("mori_high_throughput", "mori_low_latency"),
            ),
            "allgather_reducescatter",
        ),
    },
    "max_num_batched_tokens": {"-1": "auto"},
    "distributed_executor_backend": {"uni": "mp", "None": "mp"},
}


def own_value(option: str, value: str) -> str:
    """What we call `value` of the option with this name."""
    return _VALUES.get(option, {}).get(value, value)
