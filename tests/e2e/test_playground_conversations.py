"""What the chat page keeps: conversations with their branches, settings and the theme; and what it
adds to a message.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from tests.e2e.browser import Browser
from tests.e2e.chat_page import ANSWERS, IDLE, ask, begin, sent
from tests.e2e.conftest import eventually
from tests.e2e.scripted_server import NAME, Script, call, scripted

TITLES = "[...document.querySelectorAll('#conversations .open')].map((e) => e.title)"
TEXTS = (
    "[...document.querySelectorAll('.message')].map((e) => e.querySelector('.bubble, "
    ".text').textContent)"
)


def reload(page: Browser) -> None:
    """Load the page anew, at the address where it is."""
    url = page.wait("(location.hash || !document.querySelector('.message')) && location.href")
    page.open("about:blank")
    page.open(url)
    page.wait("document.querySelector('#model').value === name", name=NAME)


def say(page: Browser, script: Script, answer: str, text: str) -> None:
    """One turn of a conversation."""
    script.steps = [{"content": answer}]
    ask(page, text)


def give_files(page: Browser, selector: str, *files: Path) -> None:
    """Choose files for a file field."""
    document = page.call("DOM.getDocument")["root"]["nodeId"]
    field = page.call("DOM.querySelector", nodeId=document, selector=selector)["nodeId"]
    page.call("DOM.setFileInputFiles", nodeId=field, files=[str(file) for file in files])


def test_conversations_outlive_the_tab_and_are_found_renamed_and_deleted(
    page: Browser, script: Script
) -> None:
    say(page, script, "They *hum*.", "What do bees do?")
    page.click("#new")
    say(page, script, "They sail.", "And ships?")
    page.wait(f"{TITLES}.join() === 'And ships?,What do bees do?'")
    reload(page)
    page.wait(f"{TEXTS}.join() === 'And ships?,They sail.'")
    page.click("#conversations li:nth-child(2) .open")
    page.wait(f"{TEXTS}.join() === 'What do bees do?,They hum.'")
    assert page.run("return document.querySelector('.text em').textContent") == "hum"
    say(page, script, "Honey.", "And make?")
    assert [message["content"] for message in script.bodies[-1]["messages"]] == [
        "What do bees do?",
        "They *hum*.",
        "And make?",
    ]

    page.write("#search", "SAIL")
    page.wait(f"{TITLES}.join() === 'And ships?'")
    page.write("#search", "")
    page.wait(f"{TITLES}.length === 2")
    page.click("#conversations li:first-child .tools button:first-child")
    page.write("#conversations input", "Insects")
    page.press("Enter")
    page.wait(f"{TITLES}.join() === 'Insects,And ships?'")
    page.click("#conversations li:first-child .tools button:last-child")
    page.wait(f"{TITLES}.join() === 'And ships?'")
    assert page.run(f"return {TEXTS}") == []
    page.click("#notice button")
    page.wait(f"{TITLES}.join() === 'Insects,And ships?'")
    assert page.problems == []


def test_versions_of_answers_and_questions_are_kept(page: Browser, script: Script) -> None:
    say(page, script, "First", "One")
    script.steps = [{"content": "Second"}]
    page.click(".assistant .again")
    page.wait(f"{TEXTS}.join() === 'One,Second' && {IDLE}")
    assert page.text(".assistant .place") == "2/2"
    page.click(".assistant .back")
    page.wait(f"{TEXTS}.join() === 'One,First'")
    say(page, script, "Third", "Two")
    assert [message["content"] for message in script.bodies[-1]["messages"]] == [
        "One",
        "First",
        "Two",
    ]
    page.click(".user .edit")
    page.write(".editor textarea", "Uno")
    script.steps = [{"content": "Primo"}]
    page.press("Enter")
    page.wait(f"{TEXTS}.join() === 'Uno,Primo' && {IDLE}")
    reload(page)
    page.wait(f"{TEXTS}.join() === 'Uno,Primo'")
    page.click(".user .back")
    page.wait(f"{TEXTS}.join() === 'One,First,Two,Third'")
    assert page.text(".assistant .place") == "1/2"


def test_messages_are_deleted_and_come_back(page: Browser, script: Script) -> None:
    for number in ("One", "Two"):
        say(page, script, f"To {number}", number)
    page.click(".user:nth-child(3) .delete")
    page.wait(f"{TEXTS}.join() === 'One,To One'")
    assert page.text("#notice").startswith("2 messages were deleted.")
    page.click("#notice button")
    page.wait(f"{TEXTS}.join() === 'One,To One,Two,To Two'")
    page.click(".user:nth-child(3) .delete")
    say(page, script, "To Three", "Three")
    assert [message["content"] for message in script.bodies[-1]["messages"]] == [
        "One",
        "To One",
        "Three",
    ]


def test_an_answer_goes_on_where_it_was_cut_off(nano: Browser) -> None:
    nano.write("[name=max_tokens]", "6")
    ask(nano, "What is 47 + 38?")
    thoughts = nano.run("return document.querySelector('.thoughts').textContent")
    assert thoughts and not nano.text(".assistant .text")
    nano.write("[name=max_tokens]", "")
    nano.click(".assistant .more")
    nano.wait(f"{IDLE} && document.querySelector('.assistant .text').textContent")
    assert "85" in nano.text(".assistant .text")
    assert nano.run("return document.querySelector('.thoughts').textContent").startswith(thoughts)
    assert nano.run("return document.querySelectorAll('.assistant').length") == 1
    assert sent(nano)["continue_final_message"] is True
    assert nano.run("return document.querySelector('.more').hidden")
    assert nano.problems == []


# The database's answers to whoever reads one conversation come half a second late.
SLOW_DATABASE = """
    const { get } = IDBObjectStore.prototype;
    IDBObjectStore.prototype.get = function (key) {
        const request = get.call(this, key);
        return {
            get result() { return request.result; },
            set onsuccess(then) { request.onsuccess = () => setTimeout(then, 500); },
        };
    };
"""


def test_answers_come_in_while_another_conversation_is_shown(page: Browser, script: Script) -> None:
    """Also one that ends while its conversation is opened again."""
    goes_on = threading.Event()
    script.steps = [{"content": "Slowly "}, goes_on, {"content": "done"}]
    page.write("#prompt", "One")
    page.press("Enter")
    page.wait(f"{TEXTS}.join() === 'One,Slowly'")
    page.click("#new")
    assert page.run(f"return {TEXTS}") == []
    say(page, script, "Quick", "Two")
    page.run(SLOW_DATABASE)
    page.click("#conversations li:nth-child(2) .open")
    goes_on.set()
    page.wait(f"{TEXTS}.join() === 'One,Slowly done' && {IDLE}")


def test_a_conversation_that_is_deleted_while_it_is_answered_stays_away(
    page: Browser, script: Script
) -> None:
    script.steps = [{"content": "Slowly"}, 600]
    page.write("#prompt", "One")
    page.press("Enter")
    page.wait(f"{TEXTS}.join() === 'One,Slowly' && {TITLES}.length === 1")
    page.click("#conversations .tools button:last-child")
    page.wait(f"{TITLES}.length === 0")
    assert eventually(lambda: script.hang_ups == 1)
    time.sleep(0.3)  # for what would save it again
    reload(page)
    page.wait("document.querySelector('#conversations').textContent")
    assert page.text("#conversations") == "No conversations yet"


def test_text_files_go_into_the_message(page: Browser, script: Script, tmp_path: Path) -> None:
    code, image, large = tmp_path / "a b.py", tmp_path / "x.png", tmp_path / "large.txt"
    code.write_text("print('''```''')\n")
    image.write_bytes(b"\x89PNG\xff\xfe")
    large.write_text("x" * 600_000)
    give_files(page, "#attach-file", image)
    page.wait(
        "document.querySelector('#notice').textContent === 'x.png is not text in UTF-8; only "
        "text can be attached.'"
    )
    give_files(page, "#attach-file", large)
    page.wait(
        "document.querySelector('#notice').textContent === 'large.txt has 586 KiB; allowed: 512 "
        "KiB of text.'"
    )
    give_files(page, "#attach-file", code)
    page.wait("document.querySelector('.file .name')?.textContent === 'a b.py'")
    say(page, script, "Three marks.", "What is this?")
    content = "a b.py:\n````py\nprint('''```''')\n````\n\nWhat is this?"
    assert script.bodies[-1]["messages"] == [{"role": "user", "content": content}]
    assert page.run("return document.querySelectorAll('.file').length") == 0
    assert page.text(".attached summary") == "a b.py 17 B"
    reload(page)
    say(page, script, "Sure.", "Sure?")
    assert script.bodies[-1]["messages"][0] == {"role": "user", "content": content}


def test_settings_and_theme_are_kept_and_defaults_are_shown(page: Browser, script: Script) -> None:
    shown = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    )
    read = "return names.map((name) => document.querySelector(`[name=${name}]`).placeholder)"
    page.wait("document.querySelector('[name=temperature]').placeholder !== 'default'")
    assert page.run(read, names=shown) == ["0.7", "0.95", "40", "0", "1", "0", "0"]
    numbers: dict[str, Any] = {
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "min_tokens": 2,
    }
    for name, value in numbers.items():
        page.write(f"[name={name}]", str(value))
    page.write("[name=stop]", "END\n\\n\\n")
    page.click("#theme")
    reload(page)
    assert page.run("return document.documentElement.dataset.theme") == "dark"
    assert page.run("return document.querySelector('#settings').checkVisibility()")
    say(page, script, "Yes", "One")
    assert script.bodies[-1].items() >= {**numbers, "stop": ["END", "\n\n"]}.items()
    page.click("#settings-reset")
    say(page, script, "Yes", "Two")
    assert not {*numbers, "stop"} & set(script.bodies[-1])


def test_the_strip_tells_how_busy_the_server_is_while_the_page_is_visible(
    page: Browser, script: Script
) -> None:
    page.wait(
        "document.querySelector('#server').textContent === '2 running · 1 waiting · KV 15 % · "
        "0.0 tok/s'"
    )
    assert page.run("return document.querySelector('#server').getAttribute('href')") == "status"
    page.run("Object.defineProperty(document, 'hidden', { value: true })")

    def is_silent() -> bool:
        before = script.num_info_requests
        time.sleep(2.2)
        return script.num_info_requests == before

    assert eventually(is_silent)  # after one that is under way


def test_without_a_database_conversations_end_with_the_tab(page: Browser) -> None:
    source = "Object.defineProperty(window, 'indexedDB', { value: undefined })"
    added = page.call("Page.addScriptToEvaluateOnNewDocument", source=source)
    try:
        with scripted() as (url, script):
            begin(page, url, NAME)
            page.shows("#fleeting")
            say(page, script, "One", "First")
            page.click("#new")
            say(page, script, "Two", "Second")
            page.click("#conversations li:nth-child(2) .open")
            page.wait(f"{TEXTS}.join() === 'First,One'")
            assert page.problems == []
            page.open("about:blank")
    finally:
        page.call("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])


def test_a_tool_call_waits_for_its_result_after_a_reload(page: Browser, script: Script) -> None:
    script.steps, script.finish_reason = call("f", '{"n": 1}'), "tool_calls"
    ask(page, "One")
    reload(page)
    page.write(".call textarea", "done")
    script.steps, script.finish_reason = [{"content": "Fine"}], "stop"
    page.click("#send")
    page.wait(f"{ANSWERS} === 2 && {IDLE}")
    assert [message["role"] for message in script.bodies[-1]["messages"]] == [
        "user",
        "assistant",
        "tool",
    ]
    reload(page)
    page.wait("document.querySelector('.call .result pre')?.textContent === 'done'")
