"""Downloads from ModelScope into its cache, with `modelscope_hub` (`negamax[modelscope]`).

The package `modelscope` is not used, because it imports torch.
"""

import fnmatch
import logging
import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from negamax.base import env
from negamax.base.errors import ConfigError, NegamaxError
from negamax.base.progress import Progress, format_bytes
from negamax.checkpoint.licence import RETRY, Licence, describe_error, log_licence

NAME = "ModelScope"


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

    The order of downloads, the arguments and the errors are the same as in `huggingface.download`.
    """
    hub = _client()
    api, place = hub.HubApi(), {"revision": revision, "cache_dir": cache}

    def cached() -> Path:
        return Path(api.download_repo(model, "model", local_files_only=True, **place))

    if (env.get("HF_HUB_OFFLINE") or "0").lower() in ("1", "on", "yes", "true"):
        return cached()
    place["revision"] = revision or "master"
    try:
        listed = api.list_repo_files(model, "model", revision=place["revision"])
    except (hub.NetworkError, hub.ServerError) as error:
        try:
            return cached()
        except hub.CacheNotFound:
            raise error from None
    try:
        folder = cached()
    except hub.CacheNotFound:
        folder = Path()

    def fetch(is_wanted: Callable[[str], bool], *, logs_licence: bool = False) -> Path:
        missing = [
            file
            for file in listed
            if not file.is_dir
            and is_wanted(file.path)
            and not _is_current(folder / file.path, file)
        ]
        if not missing:
            return folder
        if logs_licence:
            page = f"{hub.get_default_config().endpoint}/models/{model}"
            log_licence(model, Licence(_licence(api, model), page))
        with Progress("fetching", unit=format_bytes) as progress:
            counting = _counting(hub, progress, sum(file.size for file in missing))
            found = api.download_repo(
                model,
                "model",
                file_list=[
                    {"Path": file.path, "Size": file.size, "Sha256": file.sha256}
                    for file in missing
                ],
                progress_callbacks=[counting],
                **place,
            )
        return Path(found)

    folder = fetch(_at_top(others))
    if check is not None:
        check(folder)
    names, is_weights = named(folder), _at_top(weights)
    if not weights:
        return folder
    return fetch(
        lambda path: is_weights(path) or any(fnmatch.fnmatch(path, name) for name in names),
        logs_licence=True,
    )


def _at_top(patterns: Sequence[str]) -> Callable[[str], bool]:
    return lambda path: "/" not in path and any(fnmatch.fnmatch(path, one) for one in patterns)


def _client() -> Any:
    """Import the client, and turn off its log lines and progress bars."""
    env.set_default("TQDM_DISABLE", "1")
    try:
        import modelscope_hub
    except ModuleNotFoundError:
        raise ConfigError(
            "--source modelscope needs the package modelscope-hub",
            hint="pip install 'negamax[modelscope]'",
        ) from None
    log = logging.getLogger("modelscope_hub")
    log.handlers.clear()
    log.propagate = True
    log.setLevel(logging.ERROR)
    return modelscope_hub


def _is_current(path: Path, file: Any) -> bool:
    """Return whether the local file is at least as new as ModelScope's file, with equal size.

    ModelScope updates the snapshot of a branch in place. Comparing hashes would take minutes.
    """
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    changed = file.last_modified
    return not isinstance(changed, datetime) or path.stat().st_mtime >= changed.timestamp()


def _licence(api: Any, model: str) -> str | None:
    try:
        found: str | None = api.get_repo(model, "model").license
    except Exception:  # the download will report the same error
        return None
    return found


def _counting(hub: Any, progress: Progress, total: int) -> type[Any]:
    """Return a class of progress callbacks. The client creates a callback for each file."""
    counting, done = threading.Lock(), 0

    class Counted(hub.ProgressCallback):  # type: ignore[misc]
        def update(self, size: int) -> None:
            nonlocal done
            with counting:  # several download threads count bytes
                done += size
                progress(min(done, total), total)

    return Counted


def failure(error: Exception, where: str) -> NegamaxError:
    hub = _client()
    if isinstance(error, hub.NotExistError):
        hint = "check the name and --revision; ModelScope and Hugging Face use different names"
        return ConfigError(f"{where} does not exist on ModelScope, or is private", hint=hint)
    if isinstance(error, hub.AuthenticationError | hub.PermissionDeniedError):
        hint = "check MODELSCOPE_API_TOKEN"
        return ConfigError(f"ModelScope denies access to {where}", hint=hint)
    if isinstance(error, hub.CacheNotFound):
        return ConfigError(f"{where} is not in ModelScope's cache; offline mode is on", hint=RETRY)
    return ConfigError(f"{where} cannot be fetched: {describe_error(error)}", hint=RETRY)
