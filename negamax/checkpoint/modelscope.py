"""Models of ModelScope: fetched into its cache by its own client, which `negamax[modelscope]`
brings. (The package `modelscope` does the same and imports torch; its hub has become a package of
its own.)
"""

from __future__ import annotations

import errno
import fnmatch
import logging
import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from negamax.base import env
from negamax.base.errors import ConfigError, NegamaxError, ResourceError
from negamax.base.progress import Progress, format_bytes
from negamax.checkpoint.licence import Licence, say_licence

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
    """The snapshot of `model` in the `cache`, with the files at its top that the patterns name;
    what of them is there is not fetched. First the others, then, where `check` takes the folder,
    weights, with the files that are `named` in the others. Errors: those of `named` and `check`,
    and whatever goes wrong, see `failure`.
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

    def fetch(is_wanted: Callable[[str], bool], *, tells_licence: bool = False) -> Path:
        """The snapshot with the files that are wanted."""
        missing = [
            file
            for file in listed
            if not file.is_dir
            and is_wanted(file.path)
            and not _is_current(folder / file.path, file)
        ]
        if not missing:
            return folder
        if tells_licence:
            page = f"{hub.get_default_config().endpoint}/models/{model}"
            say_licence(model, Licence(_licence(api, model), page))
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
    names, is_weights = set(named(folder)), _at_top(weights)
    if not weights:
        return folder
    return fetch(lambda path: is_weights(path) or path in names, tells_licence=True)


def _at_top(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a path is that of a file at the top that one of `patterns` names."""
    return lambda path: "/" not in path and any(fnmatch.fnmatch(path, one) for one in patterns)


def _client() -> Any:
    """The client's package. Its own log lines and bars of files stay away."""
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
    """Whether the file at `path` is what ModelScope has: of its size, and not older. (A snapshot of
    a branch is changed in place. To compare the hashes of weights takes minutes.)
    """
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    changed = file.last_modified
    return not isinstance(changed, datetime) or path.stat().st_mtime >= changed.timestamp()


def _licence(api: Any, model: str) -> str | None:
    try:
        found: str | None = api.get_repo(model, "model").license
    except Exception:  # the download tells what is wrong
        return None
    return found


def _counting(hub: Any, progress: Progress, total: int) -> type[Any]:
    """What the client calls for each file and each part of it."""
    counting, done = threading.Lock(), 0

    class Counted(hub.ProgressCallback):  # type: ignore[misc]
        def update(self, size: int) -> None:
            nonlocal done
            with counting:  # files are fetched by several threads
                done += size
                progress(min(done, total), total)

    return Counted


def failure(error: Exception, where: str) -> NegamaxError:
    """What to tell the user of an error that the client has raised."""
    hub = _client()
    for cause in getattr(error, "failed_files", {}).values():  # of which one says enough
        return failure(cause, where)
    if isinstance(error, OSError) and (
        error.filename or error.errno in (errno.ENOSPC, errno.EDQUOT)
    ):
        hint = "free some space or use --download-dir"
        return ResourceError(f"{where} cannot be stored: {error}", hint=hint)
    if isinstance(error, hub.NotExistError):
        hint = "check the name and --revision; names differ from those of the Hugging Face hub"
        return ConfigError(f"{where} is not on ModelScope, or private", hint=hint)
    if isinstance(error, hub.AuthenticationError | hub.PermissionDeniedError):
        hint = "check MODELSCOPE_API_TOKEN"
        return ConfigError(f"{where} is closed on ModelScope", hint=hint)
    reason = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
    hint = "check the network and run again (finished files are kept), or give a local folder"
    if isinstance(error, hub.CacheNotFound):
        return ConfigError(f"{where} is not in ModelScope's local cache: offline mode", hint=hint)
    return ConfigError(f"{where} cannot be fetched: {reason}", hint=hint)
