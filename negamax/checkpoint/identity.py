"""Identity of a checkpoint folder, by which caches and conversions recognize their source."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from negamax.config.json_file import read_file

_COMMIT = re.compile(r"[0-9a-f]{40}")
_DESCRIPTIONS = ("config.json", "hf_quant_config.json", "quant_model_description*.json")


def compute_identity(folder: Path) -> str:
    """Return lines that identify a checkpoint.

    They hold names and sizes of the weight files, their times or the hub's commit, and the content
    of the files that describe them.
    """
    commit = find_commit(folder)
    described = [path for name in _DESCRIPTIONS for path in sorted(folder.glob(name))]
    parts = [f"{path.name} {hashlib.sha256(read_file(path)).hexdigest()}" for path in described]
    for path in sorted(folder.glob("*.safetensors")):
        found = path.stat()
        parts.append(f"{path.name} {found.st_size} {commit or found.st_mtime_ns}")
    return digest(parts)


def find_commit(folder: Path) -> str | None:
    """Return the commit if `folder` is a snapshot in a hub cache."""
    folder = folder.resolve()
    is_snapshot = folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name)
    return folder.name if is_snapshot else None


def digest(parts: Iterable[str]) -> str:
    """Return the SHA-256 of lines, in hexadecimal."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
