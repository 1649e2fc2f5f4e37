"""Find the folder of a MODEL argument: a local folder, a bundled checkpoint or a hub id."""

import difflib
import errno
import re
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from negamax.base import env
from negamax.base.errors import ConfigError, NegamaxError, ResourceError
from negamax.base.log import get_logger
from negamax.checkpoint import huggingface, modelscope
from negamax.config.embedded import EMBEDDED, EMBEDDED_DRAFTS, QUOTED_NAMES
from negamax.config.json_file import read_json_object
from negamax.config.quantization import rotation_file

logger = get_logger(__name__)
_MODELSCOPE_VARIABLES = [f"{name}_USE_MODELSCOPE" for name in ("NEGAMAX", "VLLM", "SGLANG")]

# Only weights, JSON files and chat templates are downloaded: no code and no pickle files.
WEIGHT_FILES = ["*.safetensors"]
OTHER_FILES = ["*.json", "*.jinja"]

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def check_model_name(model: str, also: Collection[str] = ()) -> Path | None:
    """Return the folder of MODEL if it is a path or a bundled name, or None if it is a hub id.

    Raises `ConfigError` if MODEL is no path, bundled name or hub id. The error suggests a name.
    """
    if (embedded := EMBEDDED.get(model) or EMBEDDED_DRAFTS.get(model)) is not None:
        return embedded
    try:
        folder = Path(model).expanduser()
        if model and folder.is_dir():
            _check_folder(folder)
            return folder
        if folder.suffix == ".gguf" and folder.is_file():
            raise _refuse_gguf(model)
        if folder.is_file():
            raise ConfigError(
                f"model {model!r} is a file; a folder is needed", hint=f"use {folder.parent}"
            )
    except (OSError, RuntimeError):  # the name is too long for a path, or "~name" is unknown
        pass
    if ".gguf" in model.lower() or re.search(r"-gguf(:\S*)?$", model, re.IGNORECASE):
        raise _refuse_gguf(model[:200])
    if not _HUB_ID.fullmatch(model):
        near = difflib.get_close_matches(model.lower(), [*EMBEDDED, *EMBEDDED_DRAFTS, *also], n=1)
        raise ConfigError(
            f"model {model[:200]!r} is neither an existing folder, nor {QUOTED_NAMES}, nor a "
            "hub id",
            hint=f"did you mean {near[0]}?" if near else "a hub id looks like MiniMaxAI/MiniMax-M2",
        )
    return None


def _check_folder(folder: Path) -> None:
    """Raise `ConfigError` if `folder` lacks config.json, and its other files show the reason."""
    if (folder / "config.json").exists():
        return
    inner = [path.parent for path in (*folder.glob("snapshots/*/config.json"),
                                      *folder.glob("*/config.json"))]  # fmt: skip
    if len(inner) == 1:
        raise ConfigError(
            f"{folder} has no config.json; the checkpoint is in {inner[0].relative_to(folder)}",
            hint=f"use the folder {inner[0]}",
        )
    if inner:
        names = ", ".join(str(path.relative_to(folder)) for path in inner[:5])
        raise ConfigError(
            f"{folder} contains several checkpoints: {names}", hint="use one of these folders"
        )
    if any(folder.glob("*.gguf")):
        raise _refuse_gguf(str(folder))
    if (folder / "adapter_config.json").exists():
        raise ConfigError(
            f"{folder} contains an adapter; adapters are not supported",
            hint="merge the adapter into its checkpoint, and use the folder of the result",
        )


def _refuse_gguf(model: str) -> ConfigError:
    return ConfigError(
        f"model {model!r} is in the format GGUF, which is not supported",
        hint="use a checkpoint in the safetensors format, such as MiniMaxAI/MiniMax-M2.5",
    )


def resolve_model(
    model: str,
    revision: str | None = None,
    download_dir: str | None = None,
    source: str = "auto",
    *,
    check: Callable[[Path], object] | None = None,
    needs_weights: bool = True,
    subfolder: str | None = None,
) -> Path:
    """Return the folder of `model`. Missing files of a hub model are downloaded first.

    `revision` is a branch, tag or commit of a hub model. `download_dir` replaces the hub's own
    cache. `source` is one of `options.engine.SOURCES`. The configuration files are downloaded
    first. Then `check` is called with the folder. If `needs_weights` is set, the weights of the
    model and of `subfolder` are downloaded last.

    Raises `ConfigError` for an unknown name, a missing or private repository, an unknown revision,
    and a failed download. Raises `ResourceError` if the disk cannot store the files. Errors of
    `check` are not caught.
    """
    if (found := check_model_name(model)) is not None:
        return found
    if source == "auto":
        wanted = next(filter(None, map(env.get, _MODELSCOPE_VARIABLES)), "0").lower()
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
            named=partial(_named, subfolder=subfolder),
            check=check,
            weights=WEIGHT_FILES if needs_weights else (),
        )
    except NegamaxError:
        raise
    # All exceptions are caught, because each version of a hub's client raises exceptions of another
    # HTTP library.
    except Exception as error:
        # ModelScope's client lists the errors of all failed files; the first error is reported.
        cause = next(iter(getattr(error, "failed_files", {}).values()), error)
        is_full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        if is_full or (isinstance(cause, OSError) and cause.filename):
            hint = "free some space or use --download-dir"
            raise ResourceError(f"{where} cannot be stored: {cause}", hint=hint) from error
        raise client.failure(cause, where) from error


def _named(folder: Path, *, subfolder: str | None) -> list[str]:
    """Return the name patterns of more files to download: the QuaRot rotation for a draft model,
    and the files in `subfolder`.
    """
    config = folder / "config.json"
    rotation = rotation_file(read_json_object(config), folder) if config.is_file() else None
    files = [] if rotation is None else [rotation]
    patterns = (*OTHER_FILES, *WEIGHT_FILES) if subfolder else ()
    return [*files, *(f"{subfolder}/{pattern}" for pattern in patterns)]
