import json
from typing import Any

from tests.e2e.browser import Browser
from tests.e2e.scripted_server import Script

IDLE = "document.querySelector('#send').textContent.startsWith('Send')"
ANSWERS = "document.querySelectorAll('.assistant .foot .actions:not([hidden])').length"


def begin(page: Browser, url: str, model: str) -> None:
    page.call("Storage.clearDataForOrigin", origin=url, storageTypes="all")
    page.open(f"{url}/")
    page.wait("document.querySelector('#model').value === model", model=model)
    page.click("#settings-toggle")


# Database requests of the page end before this one does. On the second run, reads that they
# started have ended, too.
SETTLED = """
    if (!window.indexedDB) return;
    for (let time = 0; time < 2; time += 1) {
        await new Promise((done, failed) => {
            const opening = indexedDB.open("negamax");
            opening.onerror = failed;
            opening.onsuccess = () => {
                const stores = ["heads", "conversations"];
                const all = opening.result.transaction(stores, "readwrite");
                all.objectStore("heads").count();
                all.oncomplete = () => { opening.result.close(); done(); };
            };
        });
    }
"""


def send(page: Browser, text: str) -> None:
    page.write("#prompt", text)
    page.press("Enter")


def say(page: Browser, script: Script, answer: str, text: str) -> None:
    script.steps, script.finish_reason = [{"content": answer}], "stop"
    ask(page, text)


def contents(script: Script) -> list[str]:
    return [message["content"] for message in script.bodies[-1]["messages"]]


def ask(page: Browser, text: str) -> None:
    """Send a message, and wait until the page has stored and listed the answer."""
    before = page.run(f"return {ANSWERS}")
    send(page, text)
    page.wait(f"{ANSWERS} > before && {IDLE}", before=before)
    page.run(SETTLED)


def figures(page: Browser) -> dict[str, str]:
    pairs = page.run(
        "return [...[...document.querySelectorAll('.figures')].at(-1).children].map((e) => "
        "e.innerText.split('\\n'))"
    )
    return dict(pairs)


def sent(page: Browser) -> dict[str, Any]:
    asked = [each for each in page.requests if each["url"].endswith("/v1/chat/completions")]
    body: dict[str, Any] = json.loads(asked[-1]["postData"])
    return body
