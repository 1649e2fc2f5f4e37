import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from negamax.base.errors import CheckpointError, ConfigError
from negamax.checkpoint import split
from negamax.config.model_spec import ModelSpec
from negamax.models.memory import dequantized, expert_padding, weight_bytes
from negamax.models.registry import bundled_names, bundled_spec, import_names
from negamax.options.parallel import ParallelOptions
from negamax.parallel.layout import ParallelLayout
from negamax.parallel.split import check_split, possible_splits

M2 = bundled_spec("minimax-m2")
# few ranks divide its width and its number of experts
ODD = replace(M2, expert_width=1400, num_experts=6, experts_per_token=2)


def offered(error: ConfigError) -> list[ParallelOptions]:
    """Return the options that the hint of a refusal names."""
    found = []
    for part in (error.hint or "").split(", or ", 1):
        is_whole = "--enable-expert-parallel" in part
        sizes = map(int, re.findall(r"\d+", part if is_whole or not found else ""))
        found += [ParallelOptions(size, enable_expert_parallel=is_whole) for size in sizes]
    return found


@pytest.mark.parametrize("spec", [M2, ODD])
@pytest.mark.parametrize("gpus", [None, 1, 2, 3, 6, 8, 12])
def test_sizes_suggested_by_a_refusal_are_accepted(spec: ModelSpec, gpus: int | None) -> None:
    refused = 0
    for size in range(1, 49):
        for ep in (each for each in range(1, size + 1) if size % each == 0):
            try:
                check_split(ParallelLayout(tp=size, ep=ep), spec, gpus=gpus)
            except ConfigError as error:
                refused += 1
                assert offered(error)
                for options in offered(error):
                    check_split(ParallelLayout.of(options), spec, gpus=gpus)
    assert refused


def test_sizes_suggested_without_a_model_suit_every_published_one() -> None:
    lines = [{"tensor_parallel_size": tp, "expert_parallel_size": ep}
             for tp in range(1, 20) for ep in range(1, 20) if tp % ep]  # fmt: skip
    for line in lines:
        with pytest.raises(ConfigError) as caught:
            ParallelOptions(**line)
        sizes = [int(size) for size in re.findall(r"\d+", caught.value.hint or "")]
        assert sizes
        for size in sizes:
            for name in bundled_names():
                check_split(ParallelLayout(tp=size), bundled_spec(name))


def test_documents_state_the_bytes_of_each_split() -> None:
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([\d, or]+) \| .+ \| ([\d.]+) GB \| (.+) \|$", text, re.M)
    assert len(rows) == 10
    for ranks, experts, gigabytes, padding in rows:
        for ep in map(int, re.findall(r"\d+", experts)):
            layout = ParallelLayout(tp=int(ranks), ep=ep)
            found = weight_bytes(M2, dtype="bfloat16", layout=layout) / 1e9
            assert f"{found:.1f}" == gigabytes, layout
            said = expert_padding(M2, layout=layout) or "none"
            assert padding.replace(" ", "") in said, layout


def test_fp8_weights_are_split_over_as_many_ranks_as_others() -> None:
    sizes = {False: [1, 2, 4, 8, 16, 24, 48], True: [2, 4, 8, 16]}
    for whole, expected in sizes.items():
        found = [
            each.tensor_parallel_size
            for each in possible_splits(M2, most=48)
            if each.enable_expert_parallel is whole
        ]
        assert found == expected
    with pytest.raises(ConfigError) as caught:
        check_split(ParallelLayout(tp=8), M2, gpus=6)
    assert str(caught.value) == (
        "8 ranks need 8 GPUs; 6 are available (use --tensor-parallel-size 1, 2, 4, or --device cpu)"
    )
    six = replace(ODD, expert_width=1536)
    for layout, words in (
        (ParallelLayout(tp=4, ep=4), "1, 2, 4, 8 without expert parallelism, or 2 with --enable-"),
        (ParallelLayout(dp=4, ep=4), "2 with --enable-expert-parallel without --data-parallel-"),
        (ParallelLayout(tp=3, dp=2), "1, 2, 4, 8 without --data-parallel-size, or --device cpu"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_split(layout, six, gpus=8)
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match=r"size 1, 2, 4, or 3, 6 with --enable-expert"):
        check_split(ParallelLayout(tp=5), replace(ODD, num_heads=12, num_kv_heads=1), gpus=12)


@pytest.mark.parametrize(
    ("model", "tp", "holders", "words"),
    [
        ("minimax-m3", 8, 2, None),
        ("minimax-m3", 16, 4, None),
        ("minimax-m3", 16, 2, None),
        ("minimax-m2", 16, 2, None),
        ("minimax-m3", 4, 2, r"on 1 of .* 4 ranks \(use .*-size 1, or --tensor-parallel-size 8\)"),
        ("minimax-m3", 8, 4, r"on 2 of .* 8 ranks \(use .*-size 2, or --tensor-parallel-size 16\)"),
        ("minimax-m2", 8, 2, r"on 1 of .* 8 ranks \(use .*-size 1, or --tensor-parallel-size 16\)"),
    ],
)
def test_ranks_shard_the_tokens_of_replicated_heads(
    model: str, tp: int, holders: int, words: str | None
) -> None:
    layout, spec = ParallelLayout(tp=tp, dcp=holders), bundled_spec(model)
    if words is None:
        check_split(layout, spec)
        # each has the query heads of all of them
        q = next(each for each in import_names(spec).weights(spec) if each.is_query)
        plain, shared = (
            weight_bytes(spec, dtype="bfloat16", kept=dequantized, layout=each)
            for each in (ParallelLayout(tp=tp), layout)
        )
        per_layer = q.num_elements * 2 * (holders - 1) // tp
        assert 0 <= shared - plain - spec.num_layers * per_layer < 2**20  # norms of queries
        return
    with pytest.raises(ConfigError, match=words):
        check_split(layout, spec)


def test_model_without_dcp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(M2), "supports_dcp", False)
    with pytest.raises(ConfigError, match=r"KV cache of MiniMaxM2ForCausalLM cannot be sharded"):
        check_split(ParallelLayout(tp=16, dcp=2), M2)


def test_split_files_without_all_query_heads_are_refused(tmp_path: Path) -> None:
    sizes = {"tensor_parallel_size": 8, "expert_parallel_size": 1, "rank": 0}
    index = tmp_path / split.RANK_INDEX_NAME.format(0)
    index.write_text(json.dumps({"metadata": sizes, "weight_map": {}}))
    split.check_split(tmp_path, ParallelLayout(tp=8))
    with pytest.raises(
        CheckpointError, match=r"only their own query heads; .*-size is 2 \(leave it out"
    ):
        split.check_split(tmp_path, ParallelLayout(tp=8, dcp=2))
