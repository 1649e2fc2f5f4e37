import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
sys.path.append(str(Path(__file__).parent))

from test_m3_ranks import sizes_of

from negamax import LLM, SamplingParams
from tests import tiny, tiny_draft, tiny_m3
from tests.dist.engines import read_exit_codes, replace_ranks
from tests.layouts import full, parallel

TWO: dict[str, Any] = parallel(tp=2, decode_context_parallel_size=2)
SIZES = tiny.small_sizes(
    num_hidden_layers=5, num_key_value_heads=1, num_local_experts=8, max_position_embeddings=256
)


@pytest.mark.parametrize(
    ("family", "method", "ranks"),
    [
        ("m2", "eagle3", TWO),
        *(
            full(family, method, {**TWO, **more})
            for family, method, more in (
                ("m3", "ngram", {"index_cache_sharding": "on"}),
                ("m3", None, parallel(dp=2, ep=True)),
                ("m3", "ngram", parallel(pp=2, index_cache_sharding="on")),
                ("m2", "ngram", parallel(dp=2, pp=2)),
            )
        ),
    ],
    ids=str,
)
def test_captured_steps_and_drafts_keep_the_text(
    family: str,
    method: str | None,
    ranks: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = tiny.make_model if family == "m2" else tiny_m3.make_model
    folder = tiny.save(make(5, **(SIZES if family == "m2" else sizes_of(1))), tmp_path / "model")
    options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_num_batched_tokens": 24,
                               "max_num_seqs": 3, "max_model_len": 256}  # fmt: skip
    if method == "eagle3":
        sizes = {"vocab_size": 96, "hidden_size": 32}
        made = tiny_draft.make("biases, two layers", tmp_path / "draft", ids=[1, 2, 3], **sizes)
        options["speculative_config"] = {"method": method, "model": made[2], "adaptive": False}
    elif method:
        drafts = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
        options["speculative_config"] = drafts
    prompts = [[5, 6, 7, 8, 9] * 30, [5, 6, 7, 8, 9] * 3, [11, 12, 13] * 8, [33]]
    max_tokens = 20 if method == "eagle3" else 40  # n-grams need more tokens to repeat.
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    replace_ranks(monkeypatch, "captured")
    found = []
    for more in ({}, ranks):
        with LLM(str(folder), **options, **more) as llm:
            made = [*llm.generate(prompts, params), *llm.generate(prompts[:1], params)]
            stats = llm.stats()
        assert made[-1].num_cached_tokens > 100
        assert not more or set(read_exit_codes(llm)) == {0}  # Each rank has replayed steps, too.
        counts = stats.num_draft_tokens, stats.num_accepted_tokens
        found.append(([each.outputs[0].token_ids for each in made], counts))
    (expected, of_one), (texts, of_all) = found
    assert texts == expected
    assert (of_all[1] > 0) == (method is not None)
    if "pipeline_parallel_size" not in ranks:  # With pipeline stages the rows take turns.
        assert of_all == of_one
