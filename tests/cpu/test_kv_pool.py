"""What a rank's memory is shared out to, and the numbers a refusal gives."""

from __future__ import annotations

import pytest
import torch

from negamax.base.errors import ConfigError, ResourceError
from negamax.config.memory import weight_bytes
from negamax.config.model_spec import bundled_spec
from negamax.worker import device, kv_pool

GIB = 2**30


def test_stored_fp8_weights_are_counted_by_the_byte_and_dequantised_ones_by_their_dtype() -> None:
    spec = bundled_spec("minimax-m2")
    stored = weight_bytes(spec, dtype_bytes=2, keep_quantized=True)
    assert 230.0e9 < stored < 230.3e9  # as the published files, less their scales
    assert weight_bytes(spec, dtype_bytes=2, keep_quantized=False) == 2 * spec.num_parameters


def test_blocks_are_what_the_budget_holds_and_no_more_than_all_sequences_can_use() -> None:
    sizes = {"block_bytes": 1000, "block_size": 16, "max_model_len": 160}
    assert kv_pool.choose_num_blocks(**sizes, max_num_seqs=4, budget=25_500) == 25
    assert kv_pool.choose_num_blocks(**sizes, max_num_seqs=2, budget=10**9) == 20


@pytest.mark.parametrize(
    ("budget", "remedy"),
    [(9 * GIB, "lower --max-model-len to 144"), (0, "more GPUs"), (-5 * GIB, "more GPUs")],
)
def test_a_window_that_does_not_fit_is_refused_with_the_numbers(budget: int, remedy: str) -> None:
    with pytest.raises(ResourceError) as refusal:
        kv_pool.choose_num_blocks(
            block_bytes=GIB, block_size=16, max_model_len=160, max_num_seqs=4, budget=budget
        )
    text = str(refusal.value)
    assert (
        "160 tokens needs 10.00 GiB" in text
        and f"{max(0, budget) / GIB:.2f} GiB are available" in text
        and remedy in text
    )


def test_devices_and_dtypes_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.choose_device("auto", num_ranks=4) == "cpu"
    with pytest.raises(ConfigError, match="no CUDA device"):
        device.choose_device("cuda", num_ranks=1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device.choose_device("auto", num_ranks=2) == "cuda"
    with pytest.raises(ConfigError, match="4 ranks need 4 GPUs, 2 are there"):
        device.choose_device("auto", num_ranks=4)
    spec = bundled_spec("minimax-m2")
    with pytest.raises(ConfigError, match="bfloat16 or float16"):
        device.choose_dtype("float32", spec=spec, device="cuda")
    with pytest.raises(ConfigError, match="fp8 needs a GPU"):
        device.kv_dtype("fp8", dtype=torch.bfloat16, device="cpu")
    assert device.kv_dtype("fp8", dtype=torch.bfloat16, device="cuda") == torch.float8_e4m3fn
