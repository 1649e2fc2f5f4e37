"""Markers come from the folder a test lives in; how Triton's kernels and PyTorch's threads run, and
for which reasons a test may skip, is decided here.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import pytest

from negamax.base import env
from tests import forked_children

# Workers and servers start again and again: what was compiled is kept.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

TESTS = Path(__file__).parent
WAITING = ("dist", "attacks", "e2e", "install", "gpu")  # now and then, for processes of theirs
COMPUTING = ("cpu", "checks", "unit")
# What a machine may lack. A test that skips for another reason fails.
MAY_SKIP = re.compile(
    "PyTorch finds no GPU here|needs two GPUs|needs . GPUs"
    "|in this run Triton compiles its kernels for the GPU"
    "|Ray is not installed here"
    "|no Chromium here|no nginx here|no oneDNN linear here|no network namespaces here"
    "|has no wide cases|its plan depends on lengths that only the host knows"  # of tests/gpu
)


def pytest_configure(config: pytest.Config) -> None:
    """Has Triton interpret its kernels unless this run is for the GPU: Triton looks once, when a
    kernel is defined.

    PyTorch looks once too: at the tests' sizes several threads mostly wait for each other. Tests of
    threads set their number; those wait asleep, since other tests and servers want their cores. Its
    libraries compute as in the engine.
    """
    folder = tempfile.mkdtemp(prefix="negamax-tests-")
    config.add_cleanup(partial(shutil.rmtree, folder, ignore_errors=True))
    os.environ["XDG_STATE_HOME"] = folder  # crash dumps
    # What a shell runs in the background ignores the one, under nohup the other; so would the
    # commands under test.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # No client here meets a certificate of the world's authorities, which each of them would read
    # for 20 ms.
    os.environ.pop("SSL_CERT_FILE", None)
    os.environ["SSL_CERT_DIR"] = folder
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    env.set_batch_invariant_gemms()
    if config.pluginmanager.has_plugin("hypothesispytest"):
        from hypothesis import HealthCheck, settings

        # a busy one takes its time
        patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.register_profile("any machine", patient)
        settings.load_profile("any machine")
    expression = config.option.markexpr
    may_run_on_gpu = not expression or ("gpu" in expression and "not gpu" not in expression)
    if not (may_run_on_gpu and _gpu_is_here()):
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks, and an order in which the processor is busy until all workers end together: files that
    wait alternate with files that compute, the last of which are short and, in the gate, by
    themselves. Of each, those that take long come first, by folder and size.
    """
    for item in items:
        item.add_marker(getattr(pytest.mark, _folder(item.path)))
    size = {path: path.stat().st_size for path in {item.path for item in items}}
    place: dict[Path, float] = {}
    for folders in (WAITING, COMPUTING):
        files = [path for path in size if _folder(path) in folders]
        files.sort(key=lambda path: (folders.index(_folder(path)), -size[path]))
        sums = list(accumulate((size[path] for path in files), initial=0))
        place |= {path: before / sums[-1] for path, before in zip(files, sums, strict=False)}
    items.sort(key=lambda item: place[item.path])


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command that a test runs in its own process has later tests log neither what that command
    was to log nor to its standard error, which is closed by then.
    """
    loggers = [logging.getLogger(), logging.getLogger("negamax")]
    before = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected and imported stays until the end: to look through it for garbage again and
    again would take seconds.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        forked_children.environment()  # libraries that were imported have set variables


def _folder(path: Path) -> str:
    return path.relative_to(TESTS).parts[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return check_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return check_skip((yield))


def check_skip(report: Report) -> Report:
    """Have a skip for an unlisted reason fail."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not MAY_SKIP.search(reason):
            report.outcome = "failed"
            report.longrepr = f"{reason}\nMAY_SKIP in tests/conftest.py does not list this reason"
    return report


def _gpu_is_here() -> bool:
    import torch

    return torch.cuda.is_available()
