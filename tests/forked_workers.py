"""Run test files in several processes: `pytest --workers N`.

The processes are forked after one collection. Each asks for the next file when it begins the last
test of its current one, so that fixtures of the session outlive a file.
"""

import multiprocessing
import os
from collections.abc import Iterator
from itertools import groupby
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

FORK = multiprocessing.get_context("fork")
Files = list[list[pytest.Item]]


class Worker:
    """A child process that runs files of `files` by their index."""

    def __init__(self, session: pytest.Session, files: Files, name: str) -> None:
        self.link, theirs = FORK.Pipe()
        self.open: list[pytest.Item] = []  # tests whose reports have not arrived
        capture = session.config.pluginmanager.getplugin("capturemanager")
        self._process = FORK.Process(
            target=run_worker, args=(session, files, theirs, name, capture)
        )
        self._process.start()
        theirs.close()

    def assign(self, files: Files, index: int | None) -> None:
        self.link.send(index)
        self.open += [] if index is None else files[index]

    def end(self) -> None:
        self.link.close()
        self._process.join()


def run_worker(
    session: pytest.Session, files: Files, link: Connection, name: str, capture: Any
) -> None:
    """Run the files that the parent names, and send their reports."""
    config = session.config
    # The captured output and the temporary folder are this process's own; it prints nothing.
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    terminal = config.get_terminal_writer()
    terminal._file = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    folders = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.getbasetemp() / name
    folders._basetemp.mkdir()

    class Sender:
        @staticmethod
        def pytest_runtest_logreport(report: pytest.TestReport) -> None:
            link.send(config.hook.pytest_report_to_serializable(config=config, report=report))

    config.pluginmanager.register(Sender())
    items = assigned_items(files, link)
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        item = following
    link.close()
    os._exit(0)  # nothing of the parent's is undone here


def assigned_items(files: Files, link: Connection) -> Iterator[pytest.Item]:
    """Yield the tests of assigned files; ask for a file by None."""
    while True:
        link.send(None)
        index = link.recv()
        if index is None:
            return
        yield from files[index]


def place_of(item: pytest.Item) -> Path:
    """Return the file of a test; the folder of the checks, which share parsed sources."""
    return item.path.parent if item.path.parent.name == "checks" else item.path


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    config = session.config
    if config.option.workers < 2 or config.option.collectonly or session.testsfailed:
        return None  # pytest's own loop
    files = [list(items) for _, items in groupby(session.items, key=place_of)]
    config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    names = (f"worker-{number}" for number in range(len(files) + config.option.workers))
    workers = {
        worker.link: worker
        for worker in (Worker(session, files, next(names)) for _ in range(config.option.workers))
    }
    indices = iter(range(len(files)))
    while workers:
        for link in wait(list(workers)):
            worker = workers[link]
            try:
                message = link.recv()
            except EOFError:
                worker.end()
                del workers[link]
                if worker.open:
                    report_lost(config, worker.open)
                    replacement = Worker(session, files, next(names))
                    workers[replacement.link] = replacement
                continue
            if message is None:
                is_stopping = session.shouldfail or session.shouldstop
                worker.assign(files, None if is_stopping else next(indices, None))
                continue
            report = config.hook.pytest_report_from_serializable(config=config, data=message)
            if report.when == "teardown":
                worker.open = [item for item in worker.open if item.nodeid != report.nodeid]
            config.hook.pytest_runtest_logreport(report=report)
            if report.when == "teardown":
                config.hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    return True


def report_lost(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Fail the tests of a process that ended within the first of them."""
    for item in items:
        error = f"the test's process ended during {items[0].nodeid}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", error, "call")
        config.hook.pytest_runtest_logreport(report=report)
