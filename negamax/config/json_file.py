"""Read a JSON object from a checkpoint's file."""

import json
from pathlib import Path
from typing import Any

from negamax.base.errors import CheckpointError

LFS_POINTER = b"version https://git-lfs"  # begins the text that Git leaves in place of a file
MAX_BYTES = 256 * 2**20  # the index of the largest checkpoints is below 20 MiB


def check_pointer(path: Path, data: bytes) -> None:
    """Refuse a file whose first bytes are of a Git LFS pointer. Errors: `CheckpointError`."""
    if data.startswith(LFS_POINTER):
        raise CheckpointError(
            f"{path} is a Git LFS pointer: the file itself is not downloaded",
            hint=f"run `git lfs pull` in {path.parent}, or give the hub id",
        )


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the object in `path`. Errors: `CheckpointError` for a missing or malformed file."""
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing", hint="give the folder of a complete Hugging Face checkpoint"
        )
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes; allowed: {MAX_BYTES}")
        data = path.read_bytes()
        check_pointer(path, data[:64])
        value = json.loads(data)
    except OSError as error:
        raise CheckpointError.of_file(path, error) from error
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
