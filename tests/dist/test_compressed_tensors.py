import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).parents[1] / "cpu"))

from stored_formats import FORMATS, write

from negamax import LLM, SamplingParams
from tests import tiny
from tests.layouts import full

STORED = FORMATS["compressed-fp8-channel"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    stored, plain = (tmp_path_factory.mktemp(name) for name in ("stored", "plain"))
    sizes = {**tiny.random_sizes(1), "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 96, "intermediate_size": 32, "num_hidden_layers": 2}
    tiny.save(tiny.make_model(1, **sizes), stored)
    shutil.copytree(stored, plain, dirs_exist_ok=True)
    config = json.loads((stored / "config.json").read_text())
    values = write(stored, config, load_file(plain / "model.safetensors"), STORED)
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    return stored, plain


def logprobs(folder: Path, ranks: int) -> list[Any]:
    prompts = [
        torch.randint(3, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist()
        for n in (3, 17, 40)
    ]
    params = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=1
    )
    with LLM(
        str(folder), dtype="float32", tensor_parallel_size=ranks, num_threads=1, block_size=8
    ) as llm:
        return [
            (
                one.outputs[0].token_ids,
                [(entry.logprob, entry.top_logprobs) for entry in one.outputs[0].logprobs or ()],
                [entry and entry.logprob for entry in one.prompt_logprobs or ()],
            )
            for one in llm.generate(prompts, params)
        ]


@pytest.mark.parametrize("ranks", [full(1), 2])
def test_logprobs_equal_those_of_plain_weights(folders: tuple[Path, Path], ranks: int) -> None:
    stored, plain = (logprobs(folder, ranks) for folder in folders)
    assert stored == plain and stored[0][1]
