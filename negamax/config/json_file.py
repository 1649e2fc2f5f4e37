"""Read files of a checkpoint: anybody may have written them."""

import json
from pathlib import Path
from typing import Any

from negamax.base.errors import CheckpointError

LFS_POINTER = b"version https://git-lfs"  # begins the text that Git leaves in place of a file
MAX_BYTES = 64 * 2**20  # the index of the largest checkpoints is below 20 MiB


def check_pointer(path: Path, data: bytes) -> None:
    """Refuse a file whose first bytes are of a Git LFS pointer. Errors: `CheckpointError`."""
    if data.startswith(LFS_POINTER):
        raise CheckpointError(
            f"{path} is a Git LFS pointer: the file itself is not downloaded",
            hint=f"run `git lfs pull` in {path.parent}, or give the hub id",
        )


def check_regular(path: Path) -> None:
    """Refuse a FIFO, socket, device or folder: opening or reading it may never end. Errors:
    `CheckpointError`, also for a missing file.
    """
    if not path.is_file():
        found = "is no regular file" if path.exists() else "is missing"
        raise CheckpointError(
            f"{path} {found}", hint="give the folder of a complete Hugging Face checkpoint"
        )


def read_file(path: Path) -> bytes:
    """Return the bytes of a file beside the weights. Errors: `CheckpointError` for one that is
    missing, no regular file, unreadable, too large or a Git LFS pointer.
    """
    check_regular(path)
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise CheckpointError.of_file(path, error) from error
    if len(data) > MAX_BYTES:
        size = max(path.stat().st_size, len(data))
        raise CheckpointError(f"{path} has {size} bytes; allowed: {MAX_BYTES}")
    check_pointer(path, data[:64])
    return data


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the object in `path`. Errors: `CheckpointError` for a missing or malformed file."""
    try:
        value = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read as JSON: {error}", hint="download the file again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} holds {type(value).__name__}, not a JSON object",
            hint="download the file again",
        )
    return value
