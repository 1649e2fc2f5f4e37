"""QuaRot: checkpoints with a rotated residual stream, h' = h Q with Q orthogonal [hidden, hidden].

The rotation is folded into all weights, so the model itself runs as it is. A draft head that was
trained on the residual stream before it takes it back: `rotate_inputs` of the projection that reads
several streams, and `rotate_back` of the embedding and the head where it shares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.config.quantization import QuantizationSpec

_NAME = "global_rotation"
_TOLERANCE = 1e-2  # of Q Q^T, where Q is stored in 16 bits


def read_rotation(spec: QuantizationSpec | None, folder: Path) -> Tensor | None:
    """Q [hidden, hidden] fp32 of the checkpoint in `folder`, whose description names its file; None
    where it is not rotated. Errors: `CheckpointError` for a file that is missing or holds no
    rotation.
    """
    found: object = spec and spec.fields
    for name in ("optional", "quarot", "rotation_map", _NAME):
        found = found.get(name) if isinstance(found, Mapping) else None
    if spec is None or found is None:
        return None
    path = (folder / str(found)).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise CheckpointError(f"{spec.source} names a file outside the folder: {str(found)!r}")
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


def rotate_inputs(weight: Tensor, rotation: Tensor) -> Tensor:
    """weight [out, n hidden] of a projection of n residual streams side by side -> the weight that
    gives the same of the rotated ones: each [out, hidden] part times Q.
    """
    parts = weight.float().unflatten(1, (-1, len(rotation)))
    return (parts @ rotation).flatten(1).to(weight.dtype)


def rotate_back(rows: Tensor, rotation: Tensor) -> Tensor:
    """rows [vocab, hidden] of a rotated model's embedding or head -> of the one before it: times
    Q^T.
    """
    return (rows.float() @ rotation.T).to(rows.dtype)
