"""QuaRot: checkpoints with a rotated residual stream, h' = h Q with Q orthogonal [hidden, hidden].

The rotation is folded into all weights, so the model itself needs no change. A draft that was
trained on the unrotated residual stream applies Q^T to its inputs: the streams, and rows of a
shared embedding (`models/eagle3/model.py`).
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.config.json_file import check_regular, read_json_object
from negamax.config.quantization import rotation_file

_NAME = "global_rotation"
_TOLERANCE = 1e-2  # error of Q Q^T if Q is stored in 16 bits


def read_rotation(folder: Path) -> Tensor | None:
    """Return Q [hidden, hidden] fp32, or None if the checkpoint in `folder` is not rotated.

    Errors: `CheckpointError` for a file that is missing or holds no rotation.
    """
    name = rotation_file(read_json_object(folder / "config.json"), folder)
    if name is None:
        return None
    if (path := folder / name).exists():
        check_regular(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            rotation: Tensor = file.get_tensor(_NAME).float()
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: {_NAME} cannot be read: {error}", hint="download the file again"
        ) from error
    is_square = rotation.dim() == 2 and rotation.shape[0] == rotation.shape[1]
    if not is_square or not torch.allclose(
        rotation @ rotation.T, torch.eye(len(rotation)), atol=_TOLERANCE
    ):
        raise CheckpointError(f"{path}: {_NAME} {list(rotation.shape)} is no rotation")
    return rotation
