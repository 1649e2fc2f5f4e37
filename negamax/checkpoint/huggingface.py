"""Downloads from the Hugging Face hub into its cache, with the package `huggingface_hub`."""

import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from negamax.base.errors import CheckpointError, ConfigError, NegamaxError
from negamax.base.progress import Progress, format_bytes
from negamax.checkpoint.licence import RETRY, Licence, describe_error, log_licence
from negamax.config.json_file import read_json_object

NAME = "the Hugging Face hub"
_IGNORED_FILES = ("*/*",)  # files in subfolders are not downloaded
_DATA_FILE = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def download(
    model: str,
    revision: str | None,
    cache: str | None,
    *,
    others: Sequence[str],
    named: Callable[[Path], Sequence[str]],
    check: Callable[[Path], object] | None,
    weights: Sequence[str],
) -> Path:
    """Return the snapshot of `model` in `cache`, and download missing files.

    The patterns `others` and `weights` match files at the top level of the repository. Files that
    match `others` are downloaded first. If `check` then accepts the folder, the files that `named`
    lists and the weights are downloaded. `failure` translates errors of the hub's client.
    """
    folder = _fetch(model, revision, cache, others)
    if check is not None:
        check(folder)
    missing = [name for name in named(folder) if not (folder / name).is_file()]
    if not weights or (_has_weights(folder) and not missing):
        return folder
    licence = _licence(model, folder)
    if licence is not None:
        log_licence(model, licence)
    # `folder` is named after a commit, from which all files must come.
    if missing:
        _fetch(model, folder.name, cache, missing, ignored=())
    return _fetch(model, folder.name, cache, weights)


def fetch_data_file(address: str) -> Path:
    """Return the local copy of a file of a data set. Download the file first if it is missing.

    `address` is hf://datasets/OWNER/NAME[@REVISION]/FILE. Raises `ConfigError`.
    """
    found = _DATA_FILE.fullmatch(address)
    if found is None:
        refusal = f"{address[:80]!r} is not the address of a file on the hub"
        raise ConfigError(refusal, hint="use hf://datasets/OWNER/NAME/FILE or a local file")
    from huggingface_hub import hf_hub_download

    name, revision, file = found.groups()
    try:
        return Path(hf_hub_download(name, file, repo_type="dataset", revision=revision))
    except Exception as error:  # exceptions of the hub's client and of its HTTP library
        raise failure(error, f"data set {name!r}") from error


def _has_weights(folder: Path) -> bool:
    try:
        index = read_json_object(folder / _INDEX) if (folder / _INDEX).exists() else {}
        names = set(index.get("weight_map", {"": _SINGLE}).values())
    except (CheckpointError, AttributeError):
        return False
    return all((folder / str(name)).is_file() for name in names)


def _fetch(
    model: str,
    revision: str | None,
    cache: str | None,
    patterns: Sequence[str],
    ignored: Sequence[str] = _IGNORED_FILES,
) -> Path:
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        model,
        revision=revision,
        cache_dir=cache,
        allow_patterns=list(patterns),
        ignore_patterns=list(ignored),
        # On a terminal (None), the hub's client shows its own progress bars.
        tqdm_class=None if sys.stderr is not None and sys.stderr.isatty() else _logged_bar(),
    )
    return Path(folder)


def _licence(model: str, snapshot: Path) -> Licence | None:
    """Return the licence from the model card.

    Returns None if `snapshot` already has the weights, or if the hub does not answer. The download
    reports why the hub does not answer.
    """
    from huggingface_hub import HfApi, constants

    page, commit = f"{constants.ENDPOINT}/{model}", snapshot.name
    try:
        found = HfApi().model_info(model, revision=commit, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:
        return None
    names = [sibling.rfilename for sibling in found.siblings or () if "/" not in sibling.rfilename]
    if all((snapshot / name).is_file() for name in names if name.endswith(".safetensors")):
        return None
    card: Any = found.card_data or {}
    link = card.get("license_link") or next((n for n in names if n.startswith("LICENSE")), None)
    if link and "://" not in link:
        link = f"{page}/blob/{commit}/{link}"
    base = card.get("base_model") or ()
    return Licence(
        card.get("license_name") or card.get("license"),
        link or page,
        [base] if isinstance(base, str) else base,
    )


def _logged_bar() -> type[Any]:
    """Return a progress bar class for the hub's client that logs a line from time to time."""
    from huggingface_hub.utils import tqdm

    class LoggedBar(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            # Show only the bar that counts bytes. The client's other bars count files or traffic.
            counts_bytes = options.get("unit") == "B" and not str(options.get("name")).endswith(
                ".transfer"
            )
            self._progress = Progress("fetching", unit=format_bytes, enabled=counts_bytes)
            self._done = options.get("initial") or 0
            self._counting = threading.Lock()  # several download threads count bytes
            super().__init__(*arguments, **options)

        def update(self, n: float | None = 1) -> bool | None:
            with self._counting:
                self._done += int(n or 0)
                self._progress(self._done, max(self._done, int(self.total or 0)))
            drawn: bool | None = super().update(n)
            return drawn

    return LoggedBar


def failure(error: Exception, where: str) -> NegamaxError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        hint = "accept the model's terms on huggingface.co and run `hf auth login`"
        return ConfigError(f"{where} is gated on the hub", hint=hint)
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(f"{where} does not exist on the hub", hint="check --revision")
    if isinstance(error, errors.RepositoryNotFoundError):
        hint = "check the name; for a private model run `hf auth login`"
        return ConfigError(f"{where} does not exist on the hub, or is private", hint=hint)
    not_found = isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled)
    # exception of the request to the hub; None: no request was sent
    cause = error.__cause__ if not_found else error
    reason = describe_error(cause) if cause else "offline mode"
    refused = isinstance(cause, errors.HfHubHTTPError) and cause.response.status_code in (401, 403)
    hint = "check HF_TOKEN, or run `hf auth login`" if refused else RETRY
    if not_found:
        return ConfigError(
            f"{where} is not in the local cache, and the hub cannot be reached: {reason}", hint=hint
        )
    return ConfigError(f"{where} cannot be fetched: {reason}", hint=hint)
