import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "cpu"))

from m3_rank import LAYOUTS, one_rank
from m3_support import GREEDY, PARAMS, TOKENS, TOLERANCE, check, prompts_of
from rank_processes import run_ranks

from negamax import LLM
from tests import tiny, tiny_m3
from tests.layouts import full, parallel


def sizes_of(kv_heads: int) -> dict[str, Any]:
    return tiny_m3.random_sizes(
        5, vocab_size=96, num_attention_heads=8, num_key_value_heads=kv_heads,
        index_n_heads=kv_heads, dense_intermediate_size=24, intermediate_size=24,
        shared_intermediate_size=24, num_local_experts=8, num_hidden_layers=3,
        mlp_layer_types=["dense", "sparse", "sparse"], index_topk_blocks=2, index_block_size=16,
        layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    )  # fmt: skip


@pytest.mark.parametrize("tp", [2, full(4)])
def test_every_rank_has_the_logits_of_transformers(tp: int, tmp_path: Path) -> None:
    expected = {}
    for kv_heads in {layout[1] for layout in LAYOUTS if layout[0] == tp}:
        model = tiny_m3.make_model(kv_heads, **sizes_of(kv_heads))
        tiny.save(model, tmp_path / f"{kv_heads}")
        with torch.inference_mode():
            expected[kv_heads] = model(torch.tensor([TOKENS])).logits[0]
    run_ranks(one_rank, tp, str(tmp_path), world=tp)
    for case, (size, kv_heads, *rest) in enumerate(LAYOUTS):
        if size != tp:
            continue
        files = [[f"{case}-{kind}-{rank}.pt" for rank in range(tp)] for kind in (False, True)]
        load = partial(torch.load, weights_only=True)
        whole, sharded = ([load(tmp_path / name) for name in names] for names in files)
        for results in (whole, sharded):
            limits = {"atol": TOLERANCE, "rtol": 0, "msg": f"{kv_heads}, {rest}"}
            for got, *_ in results:
                assert torch.equal(got, results[0][0])  # A differing bit makes texts diverge.
                torch.testing.assert_close(got, expected[kv_heads], **limits)
        for (_, *of_all), (_, *of_shards) in zip(whole, sharded, strict=True):
            assert len(of_all) == len(of_shards) > 0
            assert all(map(torch.equal, of_all, of_shards))


SHARDED, SHARDS = {"index_cache_sharding": "on"}, {"decode_context_parallel_size": 2}


@pytest.mark.parametrize(
    ("kv_heads", "ranks"),
    [
        (1, parallel(tp=2, **SHARDS, **SHARDED)),
        full(2, parallel(tp=2, **SHARDED)),
        full(2, parallel(tp=4, **SHARDED)),
        full(2, parallel(tp=4, index_cache_sharding="off")),
        full(2, parallel(tp=4, ep=True, **SHARDS, **SHARDED)),
        full(1, parallel(tp=4, **SHARDS)),
    ],
    ids=str,
)
def test_engine_equals_transformers(kv_heads: int, ranks: dict[str, Any], tmp_path: Path) -> None:
    """Compare with transformers for chunks, preemption and cached prefixes."""
    sizes = sizes_of(kv_heads)
    model, prompts = tiny_m3.make_model(11, **sizes), prompts_of(11, sizes)
    with LLM(
        str(tiny.save(model, tmp_path)), dtype="float32", max_num_batched_tokens=37, max_num_seqs=3,
        max_model_len=256, num_kv_blocks=16, num_threads=1, **ranks,
    ) as engine:  # fmt: skip
        generations = engine.generate(prompts, PARAMS)
        prompts.append(prompts[1] + generations[1].outputs[0].token_ids[:19])
        generations += engine.generate(prompts[3:], GREEDY)
        stats, memory = engine.stats(), engine.info.memory
    check(model, prompts, generations)
    assert stats.cached_prompt_tokens > 0 and stats.preemption_count > 0
    if "index_cache_sharding" in ranks:
        is_sharded = ranks["index_cache_sharding"] == "on"
        assert ("a shard of the index keys on each rank" in memory) == is_sharded
    has_shards = "decode_context_parallel_size" in ranks
    assert ("some blocks of each KV head on each rank" in memory) == has_shards
