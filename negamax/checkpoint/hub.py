"""From the MODEL that a user names to a folder on disk: a local folder, the embedded `nano`, or a
Hugging Face hub id.
"""

from __future__ import annotations

import re
from pathlib import Path

from negamax.base.errors import CheckpointError, ConfigError
from negamax.base.log import get_logger
from negamax.checkpoint import huggingface
from negamax.checkpoint.licence import say_licence
from negamax.config.json_file import read_json_object

logger = get_logger(__name__)

NANO = "nano"
NANO_FOLDER = Path(__file__).parent.parent / "assets" / "nano"

# Weights, JSON (configs, index, tokenizer) and chat templates; never code or pickles.
WEIGHT_FILES = ["*.safetensors"]
OTHER_FILES = ["*.json", "*.jinja"]
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def resolve_model(model: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """The folder of `model`; a hub model is downloaded first, as far as files of it are missing.

    `revision` is a branch, tag or commit and only means something for a hub id; `download_dir`
    replaces the hub's own cache. Errors: `ConfigError` for a name that is none of the three, an
    unknown or closed repository or revision, and for whatever goes wrong on the way to the hub;
    `ResourceError` where the disk does not take the files.
    """
    if model == NANO:
        return NANO_FOLDER
    try:
        folder = Path(model).expanduser()
        if model and folder.is_dir():
            return folder
        if folder.is_file():
            raise ConfigError(f"model {model!r} is a file; give the folder that holds it")
    except (OSError, RuntimeError):  # a name too long for a path, "~" of an unknown user
        pass
    if not _HUB_ID.fullmatch(model):
        raise ConfigError(
            f"model {model[:200]!r} is neither an existing folder, nor 'nano', nor a hub id",
            hint="a hub id looks like MiniMaxAI/MiniMax-M2",
        )
    return _download(model, revision, download_dir)


def _download(model: str, revision: str | None, download_dir: str | None) -> Path:
    where = f"model {model!r}" + (f" at revision {revision!r}" if revision else "")
    logger.info("fetching %s from %s", where, huggingface.NAME)
    try:
        folder = huggingface.fetch(model, revision, download_dir, OTHER_FILES)
        if _has_weights(folder):
            return folder
        licence = huggingface.licence(model, folder)
        if licence is not None:
            say_licence(model, licence)
        # its name is the commit: a branch may have moved on
        return huggingface.fetch(model, folder.name, download_dir, WEIGHT_FILES)
    # among them the HTTP library's, which differs by the client's version
    except Exception as error:
        raise huggingface.failure(error, where) from error


def _has_weights(folder: Path) -> bool:
    """Whether all files of weights are in the snapshot `folder`."""
    try:
        index = read_json_object(folder / _INDEX) if (folder / _INDEX).exists() else {}
        names = set(index.get("weight_map", {"": _SINGLE}).values())
    except (CheckpointError, AttributeError):
        return False
    return all((folder / str(name)).is_file() for name in names)
