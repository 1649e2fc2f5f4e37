"""From the MODEL that a user names to a folder on disk: a local folder, the embedded `nano`, or a Hugging Face hub id."""

from __future__ import annotations

import re
from pathlib import Path

from negamax.base.errors import ConfigError, ResourceError
from negamax.base.log import get_logger

logger = get_logger(__name__)

NANO = "nano"
NANO_FOLDER = Path(__file__).parent.parent / "assets" / "nano"

# Weights, JSON (configs, index, tokenizer) and chat templates; never code or pickles, never subfolders.
ALLOWED_FILES = ["*.safetensors", "*.json", "*.jinja"]
IGNORED_FILES = ["*/*"]

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def resolve_model(model: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """The folder of `model`; a hub model is downloaded first (resumed where it stopped, and only what is missing).

    `revision` is a branch, tag or commit and only means something for a hub id; `download_dir` replaces the hub's own cache.
    Errors: `ConfigError` for a name that is none of the three, an unknown or closed repository or revision, and for a missing
    network; `ResourceError` where the disk does not take the files.
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
    import httpx
    from huggingface_hub import errors, snapshot_download

    where = f"model {model!r}" + (f" at revision {revision!r}" if revision else "")
    logger.info("fetching %s from the Hugging Face hub", where)
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=ALLOWED_FILES,
            ignore_patterns=IGNORED_FILES,
        )
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{where} is gated on the hub", hint="accept its terms on huggingface.co and run `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"{where} does not exist on the hub", hint="check --revision") from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{where} is not on the hub, or private", hint="check the name; for a private model run `hf auth login`"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ConfigError(f"{where} is not in the local cache and the hub cannot be reached", hint=_OFFLINE) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, httpx.HTTPError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{where} cannot be fetched: {reason}", hint=_OFFLINE) from error
    except OSError as error:
        raise ResourceError(f"{where} cannot be stored: {error}", hint="free some space or use --download-dir") from error
    return Path(folder)


_OFFLINE = "check the network and run again (a download resumes), or give a local folder"
