import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from negamax import LLM
from negamax.base.errors import CheckpointError
from negamax.config.embedded import EMBEDDED
from negamax.kernels.platform import platform_of

EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"


def test_the_gpu_was_measured() -> None:
    platform = platform_of(torch.device("cuda", 0))
    assert platform.vendor == "nvidia" and platform.is_measured, platform.label


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (EXPERT, 0xFF, r"w2\.weight in 1 of 256 x 512 \(F8_E4M3\), first at \[3, 5\]"),
        (EXPERT + "_scale_inv", torch.nan, r"scale_inv in 1 of 2 x 4 "),
        ("model.layers.2.self_attn.q_norm.weight", torch.inf, r"q_norm\.weight in 1 of "),
        ("lm_head.weight", -torch.inf, r"lm_head\.weight in 1 of "),
    ],
)
def test_refuses_values_not_finite(name: str, value: float, message: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EMBEDDED["nano"], tmp_path / "copy"))
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            values, is_fp8 = tensors[name], tensors[name].dtype == torch.float8_e4m3fn
            values = values.view(torch.uint8) if is_fp8 else values
            values[(3, 5) if name.endswith("w2.weight") else (0,) * values.dim()] = value
            save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        LLM(str(folder), device="cuda")


def test_the_memory_of_graphs_is_reported() -> None:
    with LLM("nano", device="cuda", max_num_seqs=16, max_num_batched_tokens=512) as llm:
        decode, prefill = re.findall(r"up to \d+ \w+: (-?\d+) MiB", llm.info.memory)
    assert min(int(decode), int(prefill)) >= 0 < int(decode) + int(prefill), llm.info.memory
