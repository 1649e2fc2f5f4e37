import math
import time
from typing import Any

import pytest
import torch
from test_gpu_engine import AGREEMENT, GREEDY, agreement, answers_of_m3, mixed_run, prompts

from negamax import LLM
from negamax.engine.core.setup import start_loop
from negamax.options.engine import EngineOptions

# (`decode_context_parallel_size` divides the tensor-parallel size)
SIZES = (
    "data_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "tensor_parallel_size",
)


def skip_without(options: dict[str, Any]) -> None:
    needed = math.prod(options.get(size, 1) for size in SIZES)
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} GPUs")


def answers(**options: Any) -> tuple[list[list[int]], list[list[int]]]:
    with LLM("nano", device="cuda", **options) as llm:
        asked = prompts(llm)
        together = [each.outputs[0].token_ids for each in llm.generate(asked, GREEDY)]
        time.sleep(0.5)  # tensors in flight between stages are received without a plan
        alone = [llm.generate(each, GREEDY)[0].outputs[0].token_ids for each in asked[:3]]
        if not options.get("enforce_eager"):
            assert "CUDA graphs" in llm.info.memory
        return together, alone


def check_nano(of_one_gpu: list[list[int]], options: dict[str, Any]) -> None:
    skip_without(options)
    together, alone = answers(**options)
    share = agreement(of_one_gpu, together)
    print(f"agreement of {options} with one GPU: {share:.4f}")
    assert share >= AGREEMENT
    assert agreement(of_one_gpu[:3], alone) >= 0.9  # a few hundred tokens


def check_nano_m3(options: dict[str, Any]) -> None:
    skip_without(options)
    share = agreement(answers_of_m3(device="cuda"), answers_of_m3(device="cuda", **options))
    print(f"agreement of nano-m3 on {options} with one GPU: {share:.4f}")
    assert share >= AGREEMENT


def check_mixed_run(
    model: str, options: dict[str, Any], *, layers: int = 2, blocks: int = 160
) -> None:
    skip_without(options)
    sizes = {"max_model_len": 8320, "num_kv_blocks": blocks, "max_num_seqs": 64}
    drawn = {"load_format": "synthetic", "num_hidden_layers": layers, "device": "cuda"}
    loop, info = start_loop(EngineOptions(model, **drawn, **sizes, **options))
    try:
        mixed_run(loop, longest=min(8000, info.max_model_len - 301))
    finally:
        loop.shutdown()
