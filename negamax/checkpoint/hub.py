"""From the MODEL that a user names to a folder on disk: a local folder, an embedded
checkpoint, or an id of a hub, Hugging Face's or ModelScope.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from negamax.base import env
from negamax.base.errors import ConfigError, NegamaxError
from negamax.base.log import get_logger
from negamax.checkpoint import huggingface, modelscope
from negamax.config.embedded import EMBEDDED, EMBEDDED_DRAFTS, QUOTED_NAMES
from negamax.config.json_file import read_json_object
from negamax.config.quantization import rotation_file

logger = get_logger(__name__)

# Weights, JSON (configs, index, tokenizer) and chat templates; never code or pickles.
WEIGHT_FILES = ["*.safetensors"]
OTHER_FILES = ["*.json", "*.jinja"]

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def resolve_model(
    model: str,
    revision: str | None = None,
    download_dir: str | None = None,
    source: str = "auto",
    *,
    check: Callable[[Path], object] | None = None,
    needs_weights: bool = True,
) -> Path:
    """The folder of `model`; a hub model is downloaded first, as far as files of it are missing.

    `revision` is a branch, tag or commit and only means something for a hub id; `download_dir`
    replaces the hub's own cache; `source` is one of `options.engine.SOURCES`. Of a hub model the
    weights are fetched last, if at all, and only where `check` takes the folder with the others.

    Errors: those of `check`; `ConfigError` for a name that is none of the three, an unknown or
    closed repository or revision, and for whatever goes wrong on the way to the hub;
    `ResourceError` where the disk does not take the files.
    """
    if (embedded := EMBEDDED.get(model) or EMBEDDED_DRAFTS.get(model)) is not None:
        return embedded
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
            f"model {model[:200]!r} is neither an existing folder, nor {QUOTED_NAMES}, nor a "
            "hub id",
            hint="a hub id looks like MiniMaxAI/MiniMax-M2",
        )
    if source == "auto":
        wanted = (env.get("NEGAMAX_USE_MODELSCOPE") or "0").lower()
        source = "modelscope" if wanted in ("1", "on", "yes", "true") else "huggingface"
    client = modelscope if source == "modelscope" else huggingface
    where = f"model {model!r}" + (f" at revision {revision!r}" if revision else "")
    logger.info("fetching %s from %s", where, client.NAME)
    try:
        return client.download(
            model,
            revision,
            download_dir,
            others=OTHER_FILES,
            named=_named,
            check=check,
            weights=WEIGHT_FILES if needs_weights else (),
        )
    except NegamaxError:
        raise
    # among them the HTTP library's, which differs by the client's version
    except Exception as error:
        raise client.failure(error, where) from error


def _named(folder: Path) -> list[str]:
    """Files in folders that those at the top of `folder` name: without them some models run, and
    others that read them do not.
    """
    config = folder / "config.json"
    rotation = rotation_file(read_json_object(config), folder) if config.is_file() else None
    return [] if rotation is None else [rotation]
