from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.bench_command import Bench
from tests.e2e.browser import Browser, browsing
from tests.e2e.chat_page import begin
from tests.e2e.scripted_server import NAME, Script, scripted_server
from tests.forked_children import start

if TYPE_CHECKING:
    import openai

MODEL = "nano"
OF_ALL_FAMILIES = (
    "test_acceptance_suite", "test_api_completions", "test_api_dialects", "test_api_generate",
    "test_api_messages", "test_api_responses", "test_verify",
)  # fmt: skip
# These tests check nano's tags, blocks of 16 tokens, context length and images.
# `test_nano_m3_server.py` has the same tests for nano-m3.
OF_NANO = {
    "test_04_prompt_of_disabled_thinking_keeps_the_prefix",
    "test_10_04_a_conversation_that_grows_finds_its_prefix_in_the_cache",
    "test_13_13_a_call_is_reported_although_no_tool_is_declared",
    "test_unmatched_think_closer_is_not_text", "test_call_without_arguments_has_none_in_the_prompt",
    "test_images_truncated_calls_and_lone_surrogates_in_a_history_are_accepted",
    "test_invoke_without_its_block_is_text_where_its_tool_is_not_allowed",
    "test_answer_thinks_signs_and_counts", "test_completions_stop_within_thinking_text",
    "test_errors_have_anthropics_shape", "test_flushed_cache_holds_no_prefix",
    "test_last_message_can_be_continued", "test_model_and_server_describe_themselves",
    "test_prompt_has_notes_raw_arguments_and_replacement_characters",
    "test_reasoning_is_placed_as_requested", "test_response_has_items_counts_and_echoes",
    "test_session_of_a_coding_agent_keeps_its_prefix_and_never_breaks",
    "test_session_of_codex_replays_its_items",
    "test_the_second_time_the_prompt_comes_from_the_cache",
    "test_text_like_a_call_is_content_without_tools",
}  # fmt: skip
STUB = "tests.e2e.stub_serve"  # program that runs a server without a model
HELD = "tests.e2e.held_engine"  # value of ENGINE_MODULE for that program
START_SECONDS = 240.0
_READY = re.compile(r"ready: (https?://\S+)/v1")


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    log_file: Path
    ready_line: str = ""

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8")

    def openai(self, api_key: str = "unused") -> openai.OpenAI:
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=180)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=180)

    def connect(self) -> socket.socket:
        url = httpx.URL(self.url)
        return socket.create_connection((url.host, url.port or 80), timeout=120)

    def get(self, path: str, **options: Any) -> httpx.Response:
        """Send a request over a new connection, which any server process may answer."""
        with self.http() as client:
            return client.get(path, **options)

    def send(
        self, path: str, body: dict[str, Any] | None = None, *, headers: Any = None, **fields: Any
    ) -> httpx.Response:
        """Post `body` with further `fields` over a new connection."""
        with self.http() as client:
            return client.post(path, json={**(body or {}), **fields}, headers=headers)

    def post(self, path: str, body: dict[str, Any] | None = None, **fields: Any) -> Any:
        """Return the JSON of the answer to `send`."""
        answer = self.send(path, body, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def gauge(self, name: str) -> float:
        values = self.by_rank(name).values()
        assert values
        return sum(values)

    def by_rank(self, name: str) -> dict[str, float]:
        text = self.get("/metrics").text
        lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
        numbers = [re.findall(r'(?:engine|replica)="(\d+)"', line) for line in lines]
        values = [float(line.rsplit(" ", 1)[1]) for line in lines]
        found = dict(zip(["".join(number) for number in numbers], values, strict=True))
        assert len(found) == len(lines), f"{name} has more labels"
        return found

    @property
    def num_aborted(self) -> int:
        return int(self.gauge("sglang:num_aborted_requests_total"))

    def engine_pid(self) -> int:
        (pid,) = self.engine_pids()
        return pid

    def engine_pids(self) -> list[int]:
        return self._children("negamax.engine.core.process", "tests.stub_engine", HELD)

    def member_pids(self) -> list[int]:
        return self._children("negamax.api.server_worker")

    def _children(self, *modules: str) -> list[int]:
        found = []
        pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        for pid in pids.split():
            with contextlib.suppress(OSError):  # The process has ended.
                command = Path(f"/proc/{pid}/cmdline").read_text()
                found += [int(pid) for module in modules if module in command]
        return found

    def stop(self, number: signal.Signals = signal.SIGTERM, *, seconds: float = 120.0) -> int:
        self.process.send_signal(number)
        return self.process.wait(seconds)


def eventually(check: Callable[[], bool], *, seconds: float = 120.0) -> bool:
    """Return whether `check` becomes true within `seconds`, enough for a busy machine."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if check():
            return True
        time.sleep(0.05)
    return False


def launch(
    *options: str,
    model: str = MODEL,
    log_file: Path,
    program: str = "negamax",
    is_forked: bool = True,
) -> subprocess.Popen[str]:
    command = (program, "serve", model, "--port", "0", "--num-threads", "1", *options)
    with log_file.open("w", encoding="utf-8") as log:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": log, "text": True}
        if is_forked:
            return start(*command, **pipes)
        return subprocess.Popen([sys.executable, "-m", *command], **pipes)


@contextlib.contextmanager
def serving(
    *options: str, log_file: Path, rate: float | None = None, **started: Any
) -> Iterator[Server]:
    """Run a server. With `rate` the server replays a text at `rate` tokens per second."""
    talk = talking(log_file.parent, tokens_per_second=rate) if rate else ()
    with ready_server(launch(*talk, *options, log_file=log_file, **started), log_file) as server:
        yield server


@contextlib.contextmanager
def ready_server(
    process: subprocess.Popen[str], log_file: Path, ready: re.Pattern[str] = _READY
) -> Iterator[Server]:
    """Wait for the line that matches `ready` and contains the URL. End `process` afterwards."""
    try:
        assert process.stdout is not None
        line = process.stdout.readline()  # If the start fails, the output ends without a line.
        match = ready.search(line)
        assert match, f"the server did not start: {line!r}\n{log_file.read_text(encoding='utf-8')}"
        yield Server(process, match[1], log_file, line)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(120)
        if process.stdout is not None:
            process.stdout.close()


def talking(
    folder: Path, *, tokens_per_second: float, context_length: int = 196_608
) -> tuple[str, ...]:
    """Return options of a server that replays one long text for every request at low cost."""
    script = folder / "talk.toml"
    text = "The lighthouse keeper counts the ships that pass. " * 1000
    script.write_text(
        f"tokens_per_second = {tokens_per_second}\ncontext_length = {context_length}\n"
        f"[[rule]]\ncontent = {json.dumps(text)}\n",
        encoding="utf-8",
    )
    return "--script", str(script), "--device", "cpu"


def shared(options: str = "", **started: Any) -> Any:
    """Return a fixture that runs one server per module, with the options of a command line."""

    @pytest.fixture(scope="module")
    def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        log_file = tmp_path_factory.mktemp("shared") / "log"
        with serving(*shlex.split(options), log_file=log_file, **started) as server:
            yield server
            assert "Traceback" not in server.log

    return running


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "server" not in metafunc.fixturenames or metafunc.function.__name__ in OF_NANO:
        return
    if metafunc.module.__name__.endswith(OF_ALL_FAMILIES):
        # Tests on nano alone have the parameter None, so that all tests share one server.
        models = [pytest.param(None, id=MODEL), pytest.param("nano-m3", marks=pytest.mark.full)]
        metafunc.parametrize("server", models, indirect=True, scope="session")


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    return Bench(tmp_path, capsys)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture
def page(browser: Browser) -> Browser:
    browser.open("about:blank")
    browser.look(width=1360, height=860)
    browser.problems.clear()
    browser.requests.clear()
    return browser


@pytest.fixture(scope="session")
def scripted_pages() -> Iterator[tuple[str, list[Script]]]:
    with scripted_server() as running:
        yield running


@pytest.fixture
def script(page: Browser, scripted_pages: tuple[str, list[Script]]) -> Iterator[Script]:
    url, scripts = scripted_pages
    scripts.append(Script())
    begin(page, url, NAME)
    yield scripts[-1]
    page.open("about:blank")


@pytest.fixture
def nano(page: Browser, server: Server) -> Browser:
    begin(page, server.url, MODEL)
    page.write("[name=temperature]", "0")
    return page
