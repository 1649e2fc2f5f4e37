"""Read a JSON object from a checkpoint's file."""

import json
from pathlib import Path
from typing import Any

from negamax.base.errors import CheckpointError

MAX_BYTES = 256 * 2**20  # the index of the largest checkpoints is below 20 MiB


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the object in `path`. Errors: `CheckpointError` for a missing or malformed file."""
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing", hint="give the folder of a complete Hugging Face checkpoint"
        )
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes; allowed: {MAX_BYTES}")
        value = json.loads(path.read_bytes())
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
