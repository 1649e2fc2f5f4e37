"""Read small files of a checkpoint. The checkpoint is not trusted."""

import json
from pathlib import Path
from typing import Any

from negamax.base.errors import CheckpointError

LFS_POINTER = b"version https://git-lfs"  # First bytes of a Git LFS pointer.
MAX_BYTES = 64 * 2**20  # Size limit of a JSON file; checkpoint indexes are below 20 MiB.


def check_pointer(path: Path, data: bytes) -> None:
    """Refuse a Git LFS pointer. `data` is the beginning of the file. Raises `CheckpointError`."""
    if data.startswith(LFS_POINTER):
        raise CheckpointError(
            f"{path} is a Git LFS pointer; the real file was not downloaded",
            hint=f"run `git lfs pull` in {path.parent}, or use the hub id",
        )


def check_regular(path: Path) -> None:
    """Raise `CheckpointError` for a path that is missing or not a regular file.

    Reading a FIFO, socket or device might never end.
    """
    if not path.is_file():
        found = "is not a regular file" if path.exists() else "is missing"
        raise CheckpointError(
            f"{path} {found}", hint="use the folder of a complete Hugging Face checkpoint"
        )


def read_file(path: Path) -> bytes:
    """Return the bytes of a file of a checkpoint.

    Raises `CheckpointError` if the file is missing, not a regular file, unreadable, larger than
    `MAX_BYTES` or a Git LFS pointer.
    """
    check_regular(path)
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise CheckpointError.of_file(path, error) from error
    if len(data) > MAX_BYTES:
        size = max(path.stat().st_size, len(data))
        raise CheckpointError(f"{path} has {size} bytes; at most {MAX_BYTES} are allowed")
    check_pointer(path, data[:64])
    return data


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`. Raises `CheckpointError`."""
    try:
        value = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read as JSON: {error}", hint="download the file again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} is a JSON {type(value).__name__}; an object is needed",
            hint="download the file again",
        )
    return value
