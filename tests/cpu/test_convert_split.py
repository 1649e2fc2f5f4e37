import json
import shutil
from pathlib import Path

import pytest
from loading_support import assert_equal, conversion, load, spec_of, stored_bytes, write_source
from model_support import random_weights
from safetensors.torch import save_file

from negamax.base.errors import CheckpointError, ConfigError
from negamax.checkpoint.reader import read_entries
from negamax.convert.convert import convert
from negamax.convert.source import Source
from negamax.convert.verify import compare
from negamax.models.registry import read_spec
from negamax.parallel.layout import ParallelLayout
from tests import tiny_m3
from tests.layouts import full


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def converted(bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("converted")
    folders = {name: root / name for name in ("fp8-channel", "fp8-block", "int4", "int8")}
    for name, folder in folders.items():
        convert(conversion(bf16, folder, name))
    return folders


@pytest.mark.parametrize(
    ("to", "tp", "ep"),
    [(None, 2, 2), ("fp8-block", 4, 2), ("int4", 4, 1)]
    + [full(to, tp, 1) for to in (None, "fp8-block") for tp in (2, 4)]
    + [full(None, 4, 2), full("fp8-block", 2, 2)]
    + [full("int4", *sizes) for sizes in ((2, 1), (2, 2), (4, 2))],
)
def test_rank_loads_the_same_from_split_files(
    to: str | None, tp: int, ep: int, bf16: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    """Experts are 128 wide, so every split divides blocks and groups."""
    whole = converted[to or "fp8-channel"]
    out = tmp_path / "out"
    convert(conversion(whole if to is None else bf16, out, to, tp=tp, ep=ep, allow_lossy=False))
    assert not any(one.error for one in compare(Source(whole), out))
    for rank in range(tp):
        layout = ParallelLayout(rank=rank, tp=tp, ep=ep)
        assert_equal(load(out, layout, is_split=True)[1], load(whole, layout)[1])
    files = [path.stat().st_size for path in out.glob("model-rank-0-*.safetensors")]
    all_files = [path.stat().st_size for path in whole.glob("*.safetensors")]
    most = 0.95 if to else 0.65  # a scale per row divides nothing
    assert len(files) == 3 and sum(files) < most * sum(all_files)
    with pytest.raises(CheckpointError, match=rf"split for --tensor-parallel-size {tp}, --expert"):
        read_entries(out)
    convert(conversion(out, tmp_path / "joined"))
    assert stored_bytes(tmp_path / "joined") == stored_bytes(whole)
    assert not list((tmp_path / "joined").glob("model-rank-*"))


def test_split_m3_loads_with_and_without_sharded_index_keys(tmp_path: Path) -> None:
    """A rank with a shard of the index keys has the index queries of all heads."""
    sizes = {"intermediate_size": 24, "shared_intermediate_size": 24, "dense_intermediate_size": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "index_n_heads": 2}
    config = tiny_m3.text_config(5, vocab_size=96, **sizes, **heads)
    spec, whole, out = read_spec(config), tmp_path / "whole", tmp_path / "out"
    whole.mkdir()
    (whole / "config.json").write_text(json.dumps(config))
    save_file(random_weights(spec, 0), whole / "model.safetensors")
    convert(conversion(whole, out, tp=2))
    with pytest.raises(ConfigError, match=r"fp8-neuron is a layout of MiniMax-M2; .* is Mini"):
        convert(conversion(whole, tmp_path / "neuron", "fp8-neuron"))
    for rank, sharded_index in ((0, False), (1, False), (1, True)):
        layout, spec = ParallelLayout(rank=rank, tp=2), spec_of(whole)
        spec = spec.shard_index() if sharded_index else spec
        found = load(out, layout, spec=spec, is_split=True)[1]
        assert_equal(found, load(whole, layout, spec=spec)[1])


def test_split_checkpoint_is_split_again_and_converted(
    bf16: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    for name, target, tp in (("two", None, 2), ("four", None, 4), ("int8", "int8", 1)):
        source = tmp_path / "two" if name != "two" else bf16
        convert(conversion(source, tmp_path / name, target, tp=tp, allow_lossy=False))
    convert(conversion(bf16, tmp_path / "at once", tp=4))
    for rank in range(4):
        layout = ParallelLayout(rank=rank, tp=4)
        folders = tmp_path / "four", tmp_path / "at once"
        assert_equal(*(load(folder, layout, is_split=True)[1] for folder in folders))
    assert stored_bytes(tmp_path / "int8") == stored_bytes(converted["int8"])
    with pytest.raises(ConfigError, match="split for as many ranks already"):
        convert(conversion(tmp_path / "two", tmp_path / "out", tp=2))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("index", r"split for 2 ranks and has no model-rank-1"),
        ("file", r"names 3 files of which 1 are missing: model-rank-1-part-00000"),
        ("sizes", r"metadata \{'rank': 0\}, which do not give the sizes"),
        ("part", r"parts of model.layers.0.* in model-rank-0.*, model-rank-1.* do not make one"),
    ],
)
def test_incomplete_split_checkpoint_is_not_joined(
    broken: str, message: str, bf16: Path, tmp_path: Path
) -> None:
    out, others = tmp_path / "out", tmp_path / "others"
    convert(conversion(bf16, out, tp=2))
    indices = [f"model-rank-{rank}.safetensors.index.json" for rank in (0, 1)]
    if broken == "index":
        (out / indices[1]).unlink()
    elif broken == "file":
        (out / "model-rank-1-part-00000.safetensors").unlink()
    elif broken == "sizes":
        index = json.loads((out / indices[0]).read_text())
        (out / indices[0]).write_text(json.dumps({**index, "metadata": {"rank": 0}}))
    else:  # a rank's file of another split
        convert(conversion(bf16, others, tp=4))
        part = "model-rank-{}-part-00000.safetensors"
        shutil.copy(others / part.format(3), out / part.format(1))
    with pytest.raises(CheckpointError, match=message):
        convert(conversion(out, tmp_path / "joined"))


def test_parts_hold_shards_at_block_borders(bf16: Path, tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", intermediate_size=640)
    convert(conversion(source, tmp_path / "out", "fp8-block", tp=4))
    for rank in range(4):
        layout = ParallelLayout(rank=rank, tp=4)
        share = layout.experts.width(640, unit=128).part
        entries = read_entries(tmp_path / "out", layout)
        name = "model.layers.0.block_sparse_moe.experts.1"
        for entry, dim in ((entries[f"{name}.w1.weight"], 0), (entries[f"{name}.w2.weight"], 1)):
            assert entry.part is not None
            held = entry.part[dim]
            assert entry.shape[dim] == 640 and held.start % 128 == 0
            assert held.start <= share.start and share.stop <= held.stop
            beyond = [range(size) for size in entry.shape]
            with pytest.raises(CheckpointError, match="convert the checkpoint again"):
                entry.translate(tuple(beyond))
