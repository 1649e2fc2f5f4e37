import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).parents[1] / "cpu"))

from stored_formats import FORMATS, write

from negamax import LLM, SamplingParams
from tests import tiny
from tests.dist.engines import COMMON
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
    prompts = [[(7 * place) % 93 + 3 for place in range(n, 2 * n)] for n in (3, 17, 40)]
    counts = {"max_tokens": 12, "logprobs": 3, "prompt_logprobs": 1}
    params = SamplingParams(temperature=0.0, ignore_eos=True, **counts)
    with LLM(str(folder), **COMMON, tensor_parallel_size=ranks, block_size=8) as llm:
        made = llm.generate(prompts, params)
        return [(m.outputs[0].token_ids, m.outputs[0].logprobs, m.prompt_logprobs) for m in made]


@pytest.mark.parametrize("ranks", [full(1), 2])
def test_logprobs_equal_those_of_plain_weights(folders: tuple[Path, Path], ranks: int) -> None:
    stored, plain = (logprobs(folder, ranks) for folder in folders)
    assert stored == plain and stored[0][1] and stored[0][2]
