import base64
import threading
import time
from pathlib import Path
from typing import Any

from PIL import Image

from tests.e2e.browser import AIM, Browser
from tests.e2e.chat_page import ANSWERS, IDLE, SETTLED, ask, begin, contents, say, send, sent
from tests.e2e.conftest import eventually
from tests.e2e.scripted_server import NAME, Script, call, scripted

TITLES = "[...document.querySelectorAll('#conversations .open')].map((e) => e.title)"
TEXTS = (
    "[...document.querySelectorAll('.message')]"
    ".map((e) => e.querySelector('.bubble, .text').textContent)"
)
RENAME, DELETE = ".tools button:first-child", ".tools button:last-child"

# Reads of one conversation, or of all conversations, return when `arrive()` is called.
HELD_READS = """
    const { Store } = await import('/playground/store.js');
    const waiting = [];
    window.numWaiting = () => waiting.length;
    window.arrive = () => waiting.shift()();
    for (const name of ['load', 'search']) {
        const read = Store.prototype[name];
        Store.prototype[name] = async function (asked) {
            const found = await read.call(this, asked);
            await new Promise((then) => waiting.push(then));
            return found;
        };
    }
"""


def row(title: str, button: str = ".open") -> str:
    """Return the selector of a button in a conversation's row, which moves with each answer."""
    return f"#conversations li:has([title='{title}']) {button}"


def wait_for(page: Browser, list_expression: str, joined: str) -> None:
    page.wait(f"{list_expression}.join() === joined", joined=joined)


def reload(page: Browser) -> None:
    page.run(SETTLED)
    url = page.wait("(location.hash || !document.querySelector('.message')) && location.href")
    page.open("about:blank")
    page.open(url)
    page.wait("document.querySelector('#model').value === name", name=NAME)


def test_conversations_are_kept_found_renamed_and_deleted(page: Browser, script: Script) -> None:
    say(page, script, "They *hum*.", "What do bees do?")
    page.click("#new")
    say(page, script, "They sail.", "And ships?")
    wait_for(page, TITLES, "And ships?,What do bees do?")
    reload(page)
    wait_for(page, TEXTS, "And ships?,They sail.")
    page.click(row("What do bees do?"))
    wait_for(page, TEXTS, "What do bees do?,They hum.")
    assert page.get(".text em", "textContent") == "hum"
    say(page, script, "Honey.", "And make?")
    assert contents(script) == ["What do bees do?", "They *hum*.", "And make?"]

    page.write("#search", "SAIL")
    wait_for(page, TITLES, "And ships?")
    page.write("#search", "")
    page.wait(f"{TITLES}.length === 2")
    page.click(row("What do bees do?", RENAME))
    page.write("#conversations input", "Insects")
    page.press("Enter")
    wait_for(page, TITLES, "Insects,And ships?")
    page.click(row("Insects", DELETE))
    wait_for(page, TITLES, "And ships?")
    assert page.run(f"return {TEXTS}") == []
    page.click("#notice button")
    wait_for(page, TITLES, "Insects,And ships?")
    assert page.problems == []


def test_versions_of_answers_and_questions_are_kept(page: Browser, script: Script) -> None:
    say(page, script, "First", "One")
    script.steps = [{"content": "Second"}]
    page.click(".assistant .again")
    page.wait(f"{TEXTS}.join() === 'One,Second' && {IDLE}")
    assert page.text(".assistant .place") == "2/2"
    page.click(".assistant .back")
    wait_for(page, TEXTS, "One,First")
    say(page, script, "Third", "Two")
    assert contents(script) == ["One", "First", "Two"]
    page.click(".user .edit")
    page.write(".editor textarea", "Uno")
    script.steps = [{"content": "Primo"}]
    page.press("Enter")
    page.wait(f"{TEXTS}.join() === 'Uno,Primo' && {IDLE}")
    reload(page)
    wait_for(page, TEXTS, "Uno,Primo")
    page.click(".user .back")
    wait_for(page, TEXTS, "One,First,Two,Third")
    assert page.text(".assistant .place") == "1/2"


def test_messages_are_deleted_and_come_back(page: Browser, script: Script) -> None:
    for number in ("One", "Two"):
        say(page, script, f"To {number}", number)
    page.click(".user:nth-child(3) .delete")
    wait_for(page, TEXTS, "One,To One")
    assert page.text("#notice").startswith("2 messages were deleted.")
    page.click("#notice button")
    wait_for(page, TEXTS, "One,To One,Two,To Two")
    page.click(".user:nth-child(3) .delete")
    say(page, script, "To Three", "Three")
    assert contents(script) == ["One", "To One", "Three"]


def test_truncated_answer_continues_where_it_ended(nano: Browser) -> None:
    nano.write("[name=max_tokens]", "6")
    ask(nano, "What is 47 + 38?")
    thoughts = nano.get(".thoughts", "textContent")
    assert thoughts and not nano.text(".assistant .text")
    nano.write("[name=max_tokens]", "")
    nano.click(".assistant .more")
    nano.wait(f"{IDLE} && document.querySelector('.assistant .text').textContent")
    assert "85" in nano.text(".assistant .text")
    assert nano.get(".thoughts", "textContent").startswith(thoughts)
    assert nano.count(".assistant") == 1
    assert sent(nano)["continue_final_message"] is True
    assert nano.get(".more", "hidden")
    assert nano.problems == []


def test_answers_come_in_while_another_conversation_is_shown(page: Browser, script: Script) -> None:
    goes_on = threading.Event()
    script.steps = [{"content": "Slowly "}, goes_on, {"content": "done"}]
    send(page, "One")
    wait_for(page, TEXTS, "One,Slowly")
    page.click("#new")
    assert page.run(f"return {TEXTS}") == []
    say(page, script, "Quick", "Two")
    page.run(HELD_READS)
    # Another tab changes the shown conversation. The change is read when another one is shown.
    page.wait("location.hash")
    page.run("new BroadcastChannel('negamax').postMessage(location.hash.slice(1))")
    page.wait("numWaiting() === 1")
    page.click(row("One"))
    wait_for(page, TEXTS, "One,Slowly")
    page.run("arrive(); await new Promise((then) => setTimeout(then))")
    assert page.run(f"return {TEXTS}") == ["One", "Slowly"]
    goes_on.set()
    page.wait(f"{TEXTS}.join() === 'One,Slowly done' && {IDLE}")


def test_open_conversation_is_shown_during_saves_and_deletes(page: Browser, script: Script) -> None:
    """Save one answer and delete the shown conversation while another conversation is read."""
    goes_on = threading.Event()
    say(page, script, "First", "One")
    page.click("#new")
    script.steps = [{"content": "Slowly "}, goes_on, {"content": "done"}]
    send(page, "Two")
    page.wait(f"{TEXTS}.join() === 'Two,Slowly' && {TITLES}.length === 2")
    page.run(HELD_READS)
    page.click(row("One"))
    page.wait("numWaiting() === 1")
    goes_on.set()
    page.wait("!document.querySelector('#conversations .dot')")  # The conversation is saved.
    page.run("arrive()")
    wait_for(page, TEXTS, "One,First")

    page.click(row("One", DELETE))
    page.click(row("Two"))
    page.wait("numWaiting() === 2")
    page.run("arrive()")
    wait_for(page, TITLES, "Two")
    page.run("arrive()")
    wait_for(page, TEXTS, "Two,Slowly done")
    skipped = page.run(
        "const before = location.hash; document.querySelector('.skip').click(); "
        "return [document.activeElement.id, location.hash === before]"
    )
    assert skipped == ["prompt", True]
    assert page.problems == []


def test_the_list_takes_clicks_while_it_changes(page: Browser, script: Script) -> None:
    say(page, script, "First", "One")
    page.click("#new")
    say(page, script, "Second", "Two")
    page.click(row("Two", RENAME))
    page.write("#conversations input", "Three")
    page.click("#prompt")
    wait_for(page, TITLES, "Three,One")
    assert page.run("return document.activeElement.id") == "prompt"

    # The new name is shown before the button is released.
    page.click(row("Three", RENAME))
    page.write("#conversations input", "Four")
    place = page.wait(AIM, selector=row("One"))
    page.mouse("mousePressed", place)
    titles = (
        "const { Store } = await import('/playground/store.js'); const store = new Store(); "
        "await store.heads(); return (await store.heads()).map((head) => head.title).join()"
    )
    assert eventually(lambda: page.run(titles) == "Four,One")
    page.mouse("mouseReleased", place)
    wait_for(page, TEXTS, "One,First")
    wait_for(page, TITLES, "Four,One")

    # The keyboard focus stays where it was.
    page.run(
        "window.button = document.querySelector(selector); "
        "button.closest('li').firstChild.focus(); button.focus()",
        selector=row("Four", DELETE),
    )
    page.run("new BroadcastChannel('negamax').postMessage('')")
    page.wait("!button.isConnected && document.activeElement.textContent === 'Delete'")

    # The result of a slow search is not shown after the search was ended.
    page.run(HELD_READS)
    page.write("#search", "Second")
    page.wait("numWaiting() === 1")
    page.write("#search", "")
    page.run("await new Promise((then) => setTimeout(then, 300))")
    page.run("arrive(); await new Promise((then) => setTimeout(then))")
    wait_for(page, TITLES, "Four,One")
    assert page.problems == []


def test_link_in_a_growing_answer_takes_clicks_and_focus(page: Browser, script: Script) -> None:
    say(page, script, "Here", "One")
    page.run(
        """
        const { MarkdownView } = await import('/playground/markdown.js');
        const box = document.querySelector('.assistant .text');
        window.view = new MarkdownView(box);
        window.text = '- See [it](https://e.example/)';
        box.addEventListener('click', (event) => {
            window.clicked = event.target.href;
            event.preventDefault();
        });
        view.show(text);
        """
    )
    place = page.wait(AIM, selector=".text a")
    page.mouse("mousePressed", place)
    page.run("view.show(text += ' and'); view.show(text += ' more', true)")
    page.mouse("mouseReleased", place)
    page.wait("window.clicked === 'https://e.example/'")
    page.wait_for_text(".text", "HereSee it and more")
    page.run("document.querySelector('.text a').focus(); view.show(text += ' text')")
    found = page.run("return [document.activeElement.href, view.text === text]")
    assert found == ["https://e.example/", True]
    assert page.problems == []


def test_conversation_deleted_during_an_answer_stays_deleted(page: Browser, script: Script) -> None:
    script.steps = [{"content": "Slowly"}, 600]
    send(page, "One")
    page.wait(f"{TEXTS}.join() === 'One,Slowly' && {TITLES}.length === 1")
    page.click(row("One", DELETE))
    page.wait(f"{TITLES}.length === 0")
    assert eventually(lambda: script.hang_ups == 1)
    time.sleep(0.3)  # A late save may come meanwhile.
    reload(page)
    page.wait("document.querySelector('#conversations').textContent")
    assert page.text("#conversations") == "No conversations yet"


def test_text_files_go_into_the_message(page: Browser, script: Script, tmp_path: Path) -> None:
    code, image, large = tmp_path / "a b.py", tmp_path / "x.png", tmp_path / "large.txt"
    code.write_text("print('''```''')\n")
    image.write_bytes(b"\x89PNG\xff\xfe")
    large.write_text("x" * 600_000)
    page.give_files("#attach-file", image)
    page.wait_for_text("#notice", "x.png is not an image that the browser can read.")
    page.give_files("#attach-file", image.rename(tmp_path / "x.bin"))
    reason = "x.bin is not text in UTF-8; allowed: text, and images in PNG, JPEG, GIF or WebP."
    page.wait_for_text("#notice", reason)
    page.give_files("#attach-file", large)
    page.wait_for_text("#notice", "large.txt has 586 KiB; allowed: 512 KiB of text.")
    page.give_files("#attach-file", code)
    page.wait_for_text(".file .name", "a b.py")
    say(page, script, "Three marks.", "What is this?")
    content = "a b.py:\n````py\nprint('''```''')\n````\n\nWhat is this?"
    assert script.bodies[-1]["messages"] == [{"role": "user", "content": content}]
    assert page.count(".file") == 0
    assert page.text(".attached summary") == "a b.py 17 B"
    reload(page)
    say(page, script, "Sure.", "Sure?")
    assert script.bodies[-1]["messages"][0] == {"role": "user", "content": content}


def test_chosen_dropped_and_pasted_images_become_parts(
    page: Browser, script: Script, tmp_path: Path
) -> None:
    red = tmp_path / "red.png"
    Image.new("RGB", (3, 2), "red").save(red)
    url = f"data:image/png;base64,{base64.b64encode(red.read_bytes()).decode()}"
    page.give_files("#attach-file", red)
    page.wait_for_text(".file .name", "red.png")
    page.run(
        """
        const text = atob(url.split(',')[1]);
        const binary = Uint8Array.from(text, (each) => each.charCodeAt(0));
        for (const [kind, name] of [['drop', 'b.png'], ['paste', 'c.png']]) {
            const moved = new DataTransfer();
            moved.items.add(new File([binary], name, { type: 'image/png' }));
            const Kind = kind === 'drop' ? DragEvent : ClipboardEvent;
            const data = { dataTransfer: moved, clipboardData: moved };
            const event = new Kind(kind, { ...data, bubbles: true, cancelable: true });
            document.querySelector('#prompt').dispatchEvent(event);
        }
        """,
        url=url,
    )
    page.wait("document.querySelectorAll('.file').length === 3")
    say(page, script, "A red one.", "What is this?")
    image = {"type": "image_url", "image_url": {"url": url}}
    content = [image, image, image, {"type": "text", "text": "What is this?"}]
    assert script.bodies[-1]["messages"] == [{"role": "user", "content": content}]
    page.wait("[...document.querySelectorAll('.bubble img')].every((e) => e.naturalWidth === 3)")
    reload(page)
    say(page, script, "Yes.", "Sure?")
    assert script.bodies[-1]["messages"][0] == {"role": "user", "content": content}
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.click("#export")
    file = tmp_path / "conversation.json"
    assert eventually(file.exists)
    before = page.wait("location.hash")
    page.give_files("#import-file", file)
    page.wait("location.hash !== before", before=before)
    assert page.count(".bubble img") == 3
    say(page, script, "Still.", "And now?")
    assert script.bodies[-1]["messages"][0] == {"role": "user", "content": content}


def test_settings_and_theme_are_kept_and_defaults_are_shown(page: Browser, script: Script) -> None:
    page.wait("document.querySelector('[name=temperature]').placeholder !== 'default'")
    defaults = {"temperature": "0.7", "top_p": "0.95", "top_k": "40", "min_p": "0"}
    defaults |= {"repetition_penalty": "1", "presence_penalty": "0", "frequency_penalty": "0"}
    for name, value in defaults.items():
        assert page.get(f"[name={name}]", "placeholder") == value, name
    numbers: dict[str, Any] = {"min_p": 0.1, "repetition_penalty": 1.1}
    numbers |= {"presence_penalty": 0.5, "min_tokens": 2}
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


def test_strip_shows_the_load_while_the_page_is_visible(page: Browser, script: Script) -> None:
    page.wait_for_text("#server", "2 running · 1 waiting · KV 15 % · 0.0 tok/s")
    assert page.run("return document.querySelector('#server').getAttribute('href')") == "status"
    page.run("Object.defineProperty(document, 'hidden', { value: true })")

    def is_silent() -> bool:
        before = script.num_info_requests
        time.sleep(2.2)
        return script.num_info_requests == before

    assert eventually(is_silent)  # A running save may have to end first.


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
            page.click(row("First"))
            wait_for(page, TEXTS, "First,One")
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
    roles = [message["role"] for message in script.bodies[-1]["messages"]]
    assert roles == ["user", "assistant", "tool"]
    reload(page)
    page.wait_for_text(".call .result pre", "done")
