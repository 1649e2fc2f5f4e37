import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "cpu"))

from foreign_family.checkpoint import CONFIG, random_tensors, save
from foreign_family.config import FAMILY, read_spec

from negamax import LLM, SamplingParams
from negamax.base import supervision
from negamax.models import registry


def test_two_ranks_give_the_text_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.FAMILIES, FAMILY.architecture, FAMILY)
    spawn = supervision.spawn

    def spawn_knowing(_module: str, *args: str) -> subprocess.Popen[bytes]:
        return spawn("tests.dist.ranks", "foreign", *args)

    monkeypatch.setattr(supervision, "spawn", spawn_knowing)
    folder = str(save(random_tensors(read_spec(CONFIG)), tmp_path))
    prompts = [list(range(3, 3 + length)) for length in (5, 40)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)

    def outputs(ranks: int) -> list[tuple[list[int], list[float]]]:
        with LLM(
            folder, device="cpu", tensor_parallel_size=ranks, num_threads=1,
            max_num_batched_tokens=16,
        ) as llm:  # fmt: skip
            found = [one.outputs[0] for one in llm.generate(prompts, params)]
        return [(list(o.token_ids), [entry.logprob for entry in o.logprobs]) for o in found]

    for (tokens, logprobs), (want, expected) in zip(outputs(2), outputs(1), strict=True):
        assert tokens == want
        assert logprobs == pytest.approx(expected, abs=1e-4)
