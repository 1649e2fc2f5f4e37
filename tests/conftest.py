"""Set markers by folder, settings of Triton and PyTorch, and the permitted reasons to skip."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterable, Iterator
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

from negamax.base import env
from tests import forked_children

if TYPE_CHECKING:
    from tests.e2e.conftest import Server

# Workers and servers start repeatedly, so keep compiled bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

TESTS = Path(__file__).parent
WAITING = ("dist", "attacks", "e2e", "install", "gpu")  # folders of tests that wait for processes
COMPUTING = ("cpu", "nano", "checks", "unit")
# Things that a machine may lack. A test that skips for another reason fails.
MAY_SKIP = re.compile(
    "PyTorch finds no GPU here|needs two GPUs|needs . GPUs|the server needs FastAPI"
    "|in this run Triton compiles its kernels for the GPU"
    "|Ray is not installed here|Triton .* is not beside this environment"
    "|NIXL is (not )?installed here"
    r"|transformers 5\.(1\d|2[0-2])\."  # The oracle needs a later release.
    "|no Chromium here|no nginx here|no oneDNN linear here|no network namespaces here"
    "|has no wide cases|its plan depends on lengths that only the host knows"  # of tests/gpu
)


def pytest_configure(config: pytest.Config) -> None:
    """Let Triton interpret its kernels unless this run needs a GPU, and set PyTorch's threads.

    Triton and PyTorch read these settings only once. One thread suffices for the sizes of the
    tests. Tests of threads set their number, and waiting threads sleep.
    """
    folder = tempfile.mkdtemp(prefix="negamax-tests-")
    config.add_cleanup(partial(shutil.rmtree, folder, ignore_errors=True))
    os.environ["XDG_STATE_HOME"] = folder  # crash dumps
    # Shells start background commands with SIGINT ignored, and nohup ignores SIGHUP. The commands
    # under test would inherit these settings.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # No client needs the certificates of public authorities, which take each client 20 ms to read.
    os.environ.pop("SSL_CERT_FILE", None)
    os.environ["SSL_CERT_DIR"] = folder
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    env.set_batch_invariant_gemms()
    if config.pluginmanager.has_plugin("hypothesispytest"):
        from hypothesis import HealthCheck, settings

        patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.register_profile("any machine", patient)
        settings.load_profile("any machine")
    expression = config.option.markexpr
    may_run_on_gpu = not expression or ("gpu" in expression and "not gpu" not in expression)
    if not (may_run_on_gpu and _gpu_is_here()):
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by folder and by `full.txt`, and order them so that all workers end together.

    Tests with long time limits come first. Files that wait alternate with files that compute.
    Within each kind, slow files come first, by folder and size. Raises `UsageError` for a line of
    `full.txt` that no test matches.
    """
    for item in items:
        item.add_marker(getattr(pytest.mark, _folder(item.path)))
    # `--last-failed` and ids on the command line collect only a part of a file.
    is_part = config.getoption("lf", False) or any("::" in arg for arg in config.args)
    unmatched = mark_full(read_full_list(), items)
    if unmatched and not is_part:
        raise pytest.UsageError(f"tests/full.txt: no test matches {', '.join(unmatched)}")
    size = {path: path.stat().st_size for path in {item.path for item in items}}
    place: dict[Path, float] = {}
    for folders in (WAITING, COMPUTING):
        files = [path for path in size if _folder(path) in folders]
        files.sort(key=lambda path: (folders.index(_folder(path)), -size[path], path))
        sums = list(accumulate((size[path] for path in files), initial=0))
        place |= {path: before / sums[-1] for path, before in zip(files, sums, strict=False)}
    items.sort(key=lambda item: (-_long_limit(item), place[item.path]))


def read_full_list() -> Iterator[str]:
    for line in (TESTS / "full.txt").read_text().splitlines():
        if not line.startswith("#"):
            yield line


def mark_full(starts: Iterable[str], items: Iterable[pytest.Item]) -> list[str]:
    """Mark tests as `full` if their ids begin with one of `starts`.

    Return the unmatched starts of collected files.
    """
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
    unmatched = []
    for start in starts:
        of_file = by_file.get(start.partition("::")[0], [])
        found = [item for item in of_file if item.nodeid.startswith(start)]
        for item in found:
            item.add_marker(pytest.mark.full)
        if of_file and not found:
            unmatched.append(start)
    return unmatched


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Undo the logging setup of commands that a test runs in its own process."""
    loggers = [logging.getLogger(), logging.getLogger("negamax")]
    before = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture(scope="session")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Run the server that e2e tests and attacks share: nano, or the model of the parameter."""
    from tests.e2e.conftest import MODEL, serving

    model = getattr(request, "param", None) or MODEL
    log_file = tmp_path_factory.mktemp("server") / "log"
    options = ("--served-model-name", MODEL, "--profile-dir", str(log_file.parent / "traces"))
    with serving(*options, model=model, log_file=log_file) as running:
        yield running
        # No test may cause an internal error of the shared server.
        assert "Traceback" not in running.log


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Do not collect garbage during collection, since scanning imported modules takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        forked_children.environment()  # Imported libraries have set variables by then.
        # Unfreeze the objects of `gc.freeze` at exit, after pytest's last garbage collection. The
        # interpreter then frees them; Triton 3.9 reports objects that are not freed.
        atexit.register(gc.unfreeze)


def _long_limit(item: pytest.Item) -> float:
    """Return a test's own limit in seconds if it is longer than a quarter of an hour, else 0."""
    limit = item.get_closest_marker("timeout")
    return limit.args[0] if limit and limit.args and limit.args[0] > 900 else 0


@cache
def _folder(path: Path) -> str:
    return path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else "nano"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return check_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return check_skip((yield))


def check_skip(report: Report) -> Report:
    """Turn a skip into a failure if its reason is not listed."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not MAY_SKIP.search(reason):
            report.outcome = "failed"
            report.longrepr = f"{reason}\nMAY_SKIP in tests/conftest.py does not list this reason"
    return report


def _gpu_is_here() -> bool:
    import torch

    return torch.cuda.is_available()
