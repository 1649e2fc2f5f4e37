import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WAIT_SECONDS = 120.0
# Returns the middle of an element. Until `aim` ends, a press that misses the moved element
# does nothing.
AIM = """(() => {
    const element = document.querySelector(selector);
    element?.scrollIntoView({ block: 'nearest' });
    const place = element?.getBoundingClientRect();
    if (!place?.width) return null;
    window.isMissed = false;
    window.aim?.abort();
    window.aim = new AbortController();
    const check = (event) => {
        if (event.type === 'pointerdown')
            isMissed = !document.querySelector(selector)?.contains(event.target);
        if (isMissed) event.preventDefault(), event.stopImmediatePropagation();
    };
    for (const type of ['pointerdown', 'mousedown', 'pointerup', 'mouseup', 'click'])
        addEventListener(type, check, { capture: true, signal: aim.signal });
    return { x: place.x + place.width / 2, y: place.y + place.height / 2 };
})()"""


class PageError(AssertionError):
    """Raised if a script fails in the page, or if a condition does not become true."""


def _description(details: dict[str, Any]) -> str:
    return str(details.get("exception", {}).get("description", details["text"]))


class Browser:
    """Control one tab. `problems` lists uncaught errors, console errors and blocked loads."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._incoming = os.fdopen(read_fd, "rb", buffering=0, closefd=False)
        self._outgoing = os.fdopen(write_fd, "wb", buffering=0, closefd=False)
        self._rest = b""
        self._last_id = 0
        self._session: str | None = None
        self.problems: list[str] = []
        self.requests: list[dict[str, Any]] = []  # {url, method, headers, postData?}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._outgoing.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise PageError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = self._incoming.read(1 << 16)
            if not part:
                raise PageError("the browser ended")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(_description(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                entry = params["entry"]
                self.problems.append(f"{entry['text']} {entry.get('url', '')}".strip())
            case "Runtime.consoleAPICalled" if params["type"] == "error":
                self.problems.append(str([argument.get("value") for argument in params["args"]]))
            case "Page.javascriptDialogOpening":
                self.problems.append(f"dialog: {params['message']}")
            case "Network.requestWillBeSent":
                self.requests.append(params["request"])

    def run(self, script: str, **values: Any) -> Any:
        """Return the value of `script`, the body of an async function with variables `values`."""
        names = ", ".join(values)
        given = ", ".join(json.dumps(value) for value in values.values())
        expression = f"(async ({names}) => {{ {script} }})({given})"
        flags = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        answer = self.call("Runtime.evaluate", expression=expression, **flags)
        if "exceptionDetails" in answer:
            raise PageError(_description(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def wait(self, condition: str, *, seconds: float = WAIT_SECONDS, **values: Any) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            value = self.run(f"return {condition}", **values)
            if value:
                return value
            time.sleep(0.05)
        text = self.run("return document.body.innerText")
        raise PageError(
            f"not within {seconds:g} s: {condition}\n--- the page:\n{text}\n--- problems: "
            f"{self.problems}"
        )

    def count(self, selector: str) -> int:
        return int(self.run("return document.querySelectorAll(s).length", s=selector))

    def get(self, selector: str, property: str) -> Any:
        return self.run(f"return document.querySelector(s).{property}", s=selector)

    def wait_for_text(self, selector: str, text: str) -> None:
        self.wait("document.querySelector(s)?.textContent === t", s=selector, t=text)

    def give_files(self, selector: str, *files: Path) -> None:
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        field = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=field, files=[str(file) for file in files])

    def shows(self, selector: str) -> None:
        self.wait("document.querySelector(selector)?.checkVisibility() === true", selector=selector)

    def open(self, url: str) -> None:
        shown = re.sub(r"//[^/@]*@", "//", url)  # The browser shows credentials unencoded.
        for _ in range(5):
            before = len(self.problems)
            self.call("Page.navigate", url=url)
            self.wait("location.href.startsWith(s) && document.readyState === 'complete'", s=shown)
            # Chromium drops open requests when another test adds a network interface.
            if not any("ERR_NETWORK_CHANGED" in text for text in self.problems[before:]):
                return
            del self.problems[before:]

    def text(self, selector: str) -> str:
        shown = self.run("return document.querySelector(s)?.innerText ?? ''", s=selector)
        return re.sub(r"\n{2,}", "\n", str(shown))

    def click(self, selector: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            place = self.wait(AIM, selector=selector)
            self.mouse("mousePressed", place)
            self.mouse("mouseReleased", place)
            if not self.run("window.aim?.abort(); return window.isMissed"):
                return
        raise PageError(f"another element covers {selector}")

    def mouse(self, kind: str, place: dict[str, float]) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def write(self, selector: str, text: str) -> None:
        self.run("const e = document.querySelector(s); e.focus(); e.select?.()", s=selector)
        self.call("Input.insertText", text=text) if text else self.press("Delete")

    def press(self, key: str) -> None:
        code = {"Enter": 13, "Escape": 27, "Tab": 9, "Delete": 46}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def look(self, *, width: int, height: int, scheme: str = "light") -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)


def chromium() -> str:
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no Chromium here: none of {', '.join(NAMES)} is on the PATH")
    return found


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    command = [
        chromium(), "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={folder}",
        "--no-first-run", "--disable-gpu",
        "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
        "--hide-scrollbars", "--disable-site-isolation-trials", "--renderer-process-limit=1",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
    ]  # fmt: skip
    child_in, our_out = os.pipe()
    our_in, child_out = os.pipe()
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Python's descriptors close on exec, except the two that are moved.
        close_fds=False,
        preexec_fn=_as_three_and_four(child_in, child_out),
    )
    os.close(child_in)
    os.close(child_out)
    try:
        yield Browser(our_in, our_out)
    finally:
        process.terminate()
        process.wait(120)
        os.close(our_in)
        os.close(our_out)
        with contextlib.suppress(OSError):  # Chromium has not started yet.
            # Chromium leaves the folder of its socket.
            shutil.rmtree((folder / "SingletonSocket").readlink().parent)


def _as_three_and_four(read_fd: int, write_fd: int) -> Callable[[], None]:
    def move() -> None:
        # No descriptor may be 3 or 4 before the other descriptor has moved.
        high_read, high_write = (
            fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 5) for fd in (read_fd, write_fd)
        )
        os.dup2(high_read, 3)
        os.dup2(high_write, 4)

    return move
