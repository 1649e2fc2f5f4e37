"""Complete a draft model's spec from the names of its tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from negamax.base.errors import ConfigError
from negamax.checkpoint.reader import read_entries
from negamax.config.json_file import read_json_object
from negamax.config.model_spec import ModelSpec
from negamax.config.quantization import rotation_file
from negamax.models.eagle3.config import DraftModel, name_draft_errors
from negamax.models.eagle3.names import EMBEDDING, HEAD, respell


def complete_draft(draft: DraftModel, target: ModelSpec, folder: Path | None) -> DraftModel:
    """Set which embedding and head `draft` uses: its own, or those of `target` in `folder` (None:
    synthetic weights). Errors: `CheckpointError`; `ConfigError` if those of the target have another
    width or a rotated head.
    """
    if draft.folder is None:
        return draft
    with name_draft_errors(draft.folder):
        found = {respell(name) for name in read_entries(Path(draft.folder))}
    rotation = folder and rotation_file(read_json_object(folder / "config.json"), folder)
    spec = replace(
        draft.spec,
        is_rotated_back=rotation is not None,
        own_embedding=EMBEDDING in found,
        own_head=HEAD in found or draft.spec.is_pruned,
    )
    borrows = not (spec.own_embedding and spec.own_head)
    if borrows and spec.hidden_size != target.hidden_size:
        raise ConfigError(
            f"the draft's hidden_size is {spec.hidden_size}, and its files lack an embedding or a "
            f"head; the model's are {target.hidden_size} wide",
            hint="use a draft with both, or one as wide as the model",
        )
    if spec.is_rotated_back and not spec.own_head:
        raise ConfigError(
            "the draft's files lack a head, and the model's is rotated together with the scale of "
            "a norm (QuaRot)",
            hint="use a draft with a head of its own",
        )
    return replace(draft, spec=spec)
