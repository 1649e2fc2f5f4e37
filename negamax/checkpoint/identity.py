"""Hash of a checkpoint folder, by which caches and conversions recognize their source."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from negamax.config.json_file import read_file

_COMMIT = re.compile(r"[0-9a-f]{40}")
_DESCRIPTIONS = ("config.json", "hf_quant_config.json", "quant_model_description*.json")


def compute_identity(folder: Path) -> str:
    """Return a hash that identifies a checkpoint.

    The hash covers names and sizes of the weight files, and the content of the files that describe
    the checkpoint. The hash also covers the hub's commit, or the modification times of local files.
    """
    commit = find_commit(folder)
    described = [path for name in _DESCRIPTIONS for path in sorted(folder.glob(name))]
    parts = [f"{path.name} {hashlib.sha256(read_file(path)).hexdigest()}" for path in described]
    for path in sorted(folder.glob("*.safetensors")):
        found = path.stat()
        parts.append(f"{path.name} {found.st_size} {commit or found.st_mtime_ns}")
    return digest(parts)


def find_commit(folder: Path) -> str | None:
    """Return the commit of `folder` if it is a snapshot in a hub cache, else None."""
    folder = folder.resolve()
    is_snapshot = folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name)
    return folder.name if is_snapshot else None


def digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
