"""QuaRot: checkpoints with a rotated residual stream, h' = h Q with Q orthogonal [hidden, hidden].

All weights of the checkpoint include the rotation, so the model needs no change. If a draft model
was trained on the unrotated residual stream, its inputs are multiplied by Q^T: residual streams and
rows of a shared embedding (`models/eagle3/model.py`).
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.config.json_file import check_regular, read_json_object
from negamax.config.quantization import rotation_file

_NAME = "global_rotation"
_TOLERANCE = 1e-2  # maximum difference of an element of Q Q^T from the identity, for 16-bit Q


def read_rotation(folder: Path) -> Tensor | None:
    """Return Q [hidden, hidden] fp32, or None if the checkpoint in `folder` is not rotated.

    Raises `CheckpointError` if the file is missing, or if its matrix is not orthogonal.
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
        raise CheckpointError(
            f"{path}: {_NAME} {list(rotation.shape)} is not a square orthogonal matrix",
            hint="download the file again",
        )
    return rotation
