"""From the MODEL that a user names to a folder on disk: a local folder, the embedded `nano`, or a
Hugging Face hub id.
"""

from __future__ import annotations

import errno
import re
import sys
import threading
from pathlib import Path
from typing import Any

from negamax.base.errors import ConfigError, NegamaxError, ResourceError
from negamax.base.log import get_logger
from negamax.base.progress import Progress, format_bytes

logger = get_logger(__name__)

NANO = "nano"
NANO_FOLDER = Path(__file__).parent.parent / "assets" / "nano"

# Weights, JSON (configs, index, tokenizer) and chat templates; never code or pickles, never
# subfolders.
ALLOWED_FILES = ["*.safetensors", "*.json", "*.jinja"]
IGNORED_FILES = ["*/*"]

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
    from huggingface_hub import snapshot_download

    where = f"model {model!r}" + (f" at revision {revision!r}" if revision else "")
    logger.info("fetching %s from the Hugging Face hub", where)
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=ALLOWED_FILES,
            ignore_patterns=IGNORED_FILES,
            # a terminal gets the hub's own bars
            tqdm_class=None if sys.stderr.isatty() else _logged_bar(),
        )
    # among them the HTTP library's, which differs by the client's version
    except Exception as error:
        raise _failure(error, where) from error
    return Path(folder)


def _logged_bar() -> type[Any]:
    """A progress bar for the hub's client that logs a line now and then."""
    from huggingface_hub.utils import tqdm

    class LoggedBar(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            # Beside the bar of bytes there are one of files and, in some versions, one of what the
            # network has brought.
            counts_bytes = options.get("unit") == "B" and not str(options.get("name")).endswith(
                ".transfer"
            )
            self._progress = Progress("fetching", unit=format_bytes, enabled=counts_bytes)
            self._done = options.get("initial") or 0
            self._counting = threading.Lock()  # files are fetched by several threads
            super().__init__(*arguments, **options)

        def update(self, n: float | None = 1) -> bool | None:
            with self._counting:
                self._done += int(n or 0)
                self._progress(self._done, max(self._done, int(self.total or 0)))
            drawn: bool | None = super().update(n)
            return drawn

    return LoggedBar


def _failure(error: Exception, where: str) -> NegamaxError:
    """What to tell the user of an error that the hub's client has raised."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        hint = "accept its terms on huggingface.co and run `hf auth login`"
        return ConfigError(f"{where} is gated on the hub", hint=hint)
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(f"{where} does not exist on the hub", hint="check --revision")
    if isinstance(error, errors.RepositoryNotFoundError):
        hint = "check the name; for a private model run `hf auth login`"
        return ConfigError(f"{where} is not on the hub, or private", hint=hint)
    if isinstance(error, OSError) and (
        error.filename or error.errno in (errno.ENOSPC, errno.EDQUOT)
    ):
        hint = "free some space or use --download-dir"
        return ResourceError(f"{where} cannot be stored: {error}", hint=hint)
    not_found = isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled)
    # why the hub was of no help; None: it is not asked at all
    cause = error.__cause__ if not_found else error
    reason = (
        ": ".join([type(cause).__name__, *str(cause).strip().splitlines()[:1]])
        if cause
        else "offline mode"
    )
    refused = isinstance(cause, errors.HfHubHTTPError) and cause.response.status_code in (401, 403)
    hint = "check HF_TOKEN, or run `hf auth login`" if refused else _OFFLINE
    if not_found:
        return ConfigError(
            f"{where} is not in the local cache and the hub cannot be reached: {reason}", hint=hint
        )
    return ConfigError(f"{where} cannot be fetched: {reason}", hint=hint)


_OFFLINE = "check the network and run again (finished files are kept), or give a local folder"
