"""Checkpoints that `negamax convert --tensor-parallel-size` split for ranks.

Each rank has its own index and files. This module does not import torch.
"""

from pathlib import Path

from negamax.base.errors import CheckpointError
from negamax.config.json_file import read_json_object
from negamax.parallel.layout import ParallelLayout

RANK_INDEX_NAME = "model-rank-{}.safetensors.index.json"
# Key in a file's header: full shape and offset of each tensor that the file stores in part.
PARTS_KEY = "negamax_parts"
_MAX_RANKS = 1024


def is_split(folder: Path) -> bool:
    return (folder / RANK_INDEX_NAME.format(0)).exists()


def read_ranks(folder: Path) -> list[ParallelLayout]:
    """Return the ranks for which a checkpoint is split, or an empty list if it is not split.

    Raises `CheckpointError` if the index lacks a valid tensor or expert parallel size.
    """
    if not is_split(folder):
        return []
    path = folder / RANK_INDEX_NAME.format(0)
    given = read_json_object(path).get("metadata")
    sizes = given if isinstance(given, dict) else {}
    tp, ep = sizes.get("tensor_parallel_size"), sizes.get("expert_parallel_size")
    if type(tp) is not int or type(ep) is not int or not 1 <= ep <= tp <= _MAX_RANKS or tp % ep:
        raise CheckpointError(
            f"{path} lacks a valid tensor or expert parallel size: its metadata is {given!r}",
            hint="convert the checkpoint again",
        )
    return [ParallelLayout(rank=rank, tp=tp, ep=ep) for rank in range(tp)]


def check_split(folder: Path, layout: ParallelLayout) -> None:
    """Raise `CheckpointError` if `folder` is split for another layout, or lacks the index."""
    ranks = read_ranks(folder)
    if layout not in ranks:
        original = "leave the option out, or use the checkpoint that was split"
        for value, difference in (
            (layout.redundant_experts,
             "ranks without redundant experts, but num_redundant_experts of --eplb-config is "
             f"{layout.redundant_experts}"),
            (layout.expert_placement,
             "experts in index order, but --init-expert-location changes the order"),
            (layout.dcp > 1,
             "ranks that hold only their own query heads, but --decode-context-parallel-size is "
             f"{layout.dcp}"),
        ):  # fmt: skip
            if value:
                raise CheckpointError(f"{folder} is split for {difference}", hint=original)
        tp, ep = ranks[0].tp, ranks[0].ep
        raise CheckpointError(
            f"{folder} is split for --tensor-parallel-size {tp}, --expert-parallel-size {ep}; the "
            f"command starts {layout.world_size} ranks with --tensor-parallel-size {layout.tp}, "
            f"--expert-parallel-size {layout.ep}",
            hint="start with the sizes of the split, use the original checkpoint, or join "
            "this checkpoint with `negamax convert`",
        )
    name = RANK_INDEX_NAME.format(layout.rank)
    if not (folder / name).exists():
        raise CheckpointError(
            f"{folder} is split for {len(ranks)} ranks, but {name} is missing",
            hint="copy the files of all ranks into this folder",
        )
