import json
import os
import re
import subprocess
import threading
from pathlib import Path

import httpx
import pytest

from tests.e2e.browser import Browser
from tests.e2e.chat_page import ANSWERS, IDLE, ask, contents, figures, say, send, sent
from tests.e2e.conftest import MODEL, Server, eventually, serving
from tests.e2e.scripted_server import NAME, Script, call, scripted

FOCUSED = "document.activeElement.getAttribute('aria-label')"
POLICY = {
    "default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", "img-src data: 'self'",
    "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'", "require-trusted-types-for 'script'",
    "trusted-types 'none'",
}  # fmt: skip


def test_answers_stream_with_folded_thinking_and_figures(nano: Browser, server: Server) -> None:
    assert nano.text("#window-text") == "4,096 tokens"
    ask(nano, "Tom has 47 apples and buys 38 more. How many apples does he have now?")
    assert "85" in nano.text(".assistant .text")
    # The duration is not always known.
    assert nano.text(".thinking .label").startswith("Thought")
    assert nano.get(".thinking", "open") is False
    nano.click(".thinking summary")
    assert "47" in nano.text(".thoughts")
    first = figures(nano)
    names = {"First token", "Total", "Prompt", "Cached", "Output", "Thinking", "Finish"}
    assert first.keys() - {"Speed"} == names
    assert 0 < int(first["Thinking"]) < int(first["Output"])
    used = int(first["Prompt"]) + int(first["Output"])
    assert nano.text("#window-text") == f"{used} of 4,096 tokens"

    def speed_again() -> float:
        """Ask for another version of the answer. Return the speed, or 0 for a single piece."""
        nano.click(".assistant .again")
        nano.wait(f"{ANSWERS} === 1 && {IDLE}")
        return float(figures(nano).get("Speed", "0").removesuffix(" tok/s"))

    assert any(speed_again() > 1 for _ in range(10))
    assert "85" in nano.text(".assistant .text")
    assert int(figures(nano)["Cached"]) > 0  # The prompt is cached the second time.
    assert nano.problems == []
    urls = [request["url"] for request in nano.requests]
    assert all(url.startswith((server.url, "about:blank")) for url in urls)


def test_a_tool_call_takes_its_result_and_goes_on(nano: Browser) -> None:
    nano.click("#tools-example")
    ask(nano, "What is the weather in Paris?")
    assert nano.text(".call .name") == "get_weather"
    assert nano.text(".call pre") == '{\n  "city": "Paris"\n}'
    assert nano.run(f"return {FOCUSED}") == "Result of get_weather"
    assert nano.text("#send") == "Send results"
    nano.write(".call textarea", '{"temperature": 21}')
    nano.click("#send")
    nano.wait(f"{ANSWERS} === 2 && {IDLE}")
    question, asked, result = sent(nano)["messages"]
    assert question == {"role": "user", "content": "What is the weather in Paris?"}
    (asked_call,) = asked["tool_calls"]
    assert asked["reasoning_content"]
    assert asked_call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    answer = {"role": "tool", "tool_call_id": asked_call["id"], "content": '{"temperature": 21}'}
    assert result == answer
    assert nano.text(".assistant:last-child .text")
    assert nano.problems == []


def test_settings_are_fields_of_the_request_and_the_server_takes_them(nano: Browser) -> None:
    fields = {"top_p": 0.9, "top_k": 20, "seed": 7, "max_tokens": 12, "budget": 6}
    for name, value in fields.items():
        nano.write(f"[name={name}]", str(value))
    nano.write("[name=system]", "Be brief.")
    nano.run(
        """
        const { thinking, effort, tool_choice, parallel } = document.querySelector('#settings-form').elements;
        [thinking.value, effort.value, tool_choice.value, parallel.checked] = ['enabled', 'low', 'none', false];
        """
    )
    nano.click("#tools-example")
    ask(nano, "Hello!")
    body = sent(nano)
    roles = {"system": "Be brief.", "user": "Hello!"}
    assert body.pop("messages") == [{"role": role, "content": text} for role, text in roles.items()]
    assert [tool["function"]["name"] for tool in body.pop("tools")] == ["get_weather"]
    assert body == {
        "model": MODEL, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": 0, "top_p": 0.9, "top_k": 20, "max_tokens": 12, "seed": 7, "thinking": {"type": "enabled"},
        "reasoning_effort": "low", "thinking_token_budget": 6, "tool_choice": "none", "parallel_tool_calls": False,
    }  # fmt: skip
    assert int(figures(nano)["Output"]) <= 12
    assert nano.text(".problem") in ("", "Cut off: token limit reached.")
    nano.write("[name=temperature]", "3")  # The form itself refuses this number.
    send(nano, "Hello again!")
    assert nano.count(".user") == 1
    assert nano.get("#prompt", "value") == "Hello again!"


def test_an_error_of_the_server_is_shown_with_its_request_id(nano: Browser) -> None:
    nano.write("[name=tools]", '[{"type": "function", "function": {"name": "a<b"}}]')
    ask(nano, "Hello!")
    assert "tools[0].function.name" in nano.text(".problem")
    details = nano.text(".problem .details")
    assert details.startswith("HTTP 400 · ")
    assert len(details.partition("request id ")[2]) == 24
    nano.click("#tools-clear")
    nano.click(".assistant .again")
    nano.wait(f"{IDLE} && document.querySelector('.assistant .text').textContent")
    assert sent(nano)["messages"] == [{"role": "user", "content": "Hello!"}]


def test_refusals_and_errors_in_a_stream_keep_earlier_text(page: Browser, script: Script) -> None:
    error = {"message": "the queue is full", "code": "queue_full"}
    script.refusal = (429, error, {"retry-after": "2"})
    ask(page, "One")
    details = "HTTP 429 · queue_full · try again in 2 s · request id request-refused"
    assert page.text(".problem") == f"the queue is full\n{details}"
    script.refusal = None
    gone = {"message": "the engine is gone", "code": "engine_dead"}
    script.steps = [{"content": "Half an ans"}, {"error": gone}]
    page.click(".assistant .again")
    page.wait(f"{IDLE} && document.querySelector('.assistant .text').textContent === 'Half an ans'")
    assert page.text(".problem") == "the engine is gone\nengine_dead · request id request-2"
    say(page, script, "Whole", "Two")
    assert contents(script) == ["One", "Half an ans", "Two"]


def test_thinking_and_arguments_are_shown_as_they_arrive(page: Browser, script: Script) -> None:
    start, end = '{"path": "a.py", "size": 12345678901234567890, "no', 'ne": [], "text": "x\\"\\n"}'
    *pieces, last = call("write_file", start, end)
    looks, calls = threading.Event(), threading.Event()
    thoughts = [{"reasoning_content": "First I "}, looks, {"reasoning_content": "look."}]
    script.steps = [*thoughts, {"content": "Now"}, *pieces, calls, last]
    script.finish_reason = "tool_calls"
    send(page, "Write")
    page.wait_for_text(".thinking .preview", "First I ")
    assert page.text(".thinking .label").startswith("Thinking")
    # The label counts seconds.
    label = "document.querySelector('.thinking .label').textContent"
    page.wait(f"/^Thinking \\d+\\.\\d s/.test({label})")
    looks.set()
    page.wait_for_text(".call .state", "writing …")
    page.wait("document.querySelector('.call pre').textContent.endsWith('\"no')")
    calls.set()
    page.wait(IDLE)
    whole = """{
  "path": "a.py",
  "size": 12345678901234567890,
  "none": [],
  "text": "x\\"\\n"
}"""
    assert page.text(".call pre") == whole
    assert re.match(r"Thought for \d+\.\d s", page.text(".thinking .label"))


def test_stopping_ends_the_request_and_keeps_the_text(page: Browser, script: Script) -> None:
    late = call("late", '{"a": ', index=1)
    script.steps = [{"content": "As far as"}, *call("whole", "{}"), *late, 60]
    send(page, "One")
    page.wait_for_text(".call:nth-child(2) .state", "writing …")
    page.press("Escape")
    page.wait(IDLE)
    assert page.text(".problem").startswith("Stopped.")
    assert eventually(lambda: script.hang_ups == 1)
    say(page, script, "More", "Two")
    # The history holds calls without an answer.
    assert script.bodies[-1]["messages"][1] == {"role": "assistant", "content": "As far as"}


def test_a_call_that_the_token_limit_cut_off_is_left_out(page: Browser, script: Script) -> None:
    script.steps, script.finish_reason = [{"content": "Well"}, *call("cut", '{"a": "')], "length"
    ask(page, "One")
    assert page.text(".call .state") == "incomplete"
    words = "Cut off: token limit reached.\nA tool call is incomplete"
    assert page.text(".problem").startswith(words)
    assert page.run("return document.querySelector('.call textarea')") is None
    say(page, script, "More", "Two")
    assert script.bodies[-1]["messages"][1] == {"role": "assistant", "content": "Well"}


def test_editing_asks_again_from_there(page: Browser, script: Script) -> None:
    for text in ("One", "Two", "Three"):
        say(page, script, "Answer", text)
    page.click(".user:nth-child(3) .edit")
    page.write(".editor textarea", "Two, changed")
    page.press("Enter")
    page.wait(f"{ANSWERS} === 2 && {IDLE}")
    assert contents(script) == ["One", "Answer", "Two, changed"]
    assert page.count(".message") == 4
    page.click("#new")
    assert page.count(".message") == 0


def test_the_key_is_asked_for_and_kept_in_the_tab_only(page: Browser) -> None:
    with scripted() as (url, script):
        script.key = "secret"
        script.steps = [{"content": "Open"}]
        page.open(f"{url}/")
        page.shows("#key-dialog")
        assert page.text("#key-reason") == "the API key is missing"
        page.write("#key", "wrong")
        page.press("Enter")
        field = "document.querySelector('#key').value"
        page.wait(f"document.querySelector('#key-dialog').open && !{field}")
        page.write("#key", "secret")
        page.press("Enter")
        page.wait("document.querySelector('#model').value === name", name=NAME)
        ask(page, "Hello")
        assert page.text(".assistant .text") == "Open"
        kept = """return [
            Object.values(sessionStorage),
            Object.values(localStorage).join().includes('secret'),
            document.cookie,
        ]"""
        assert page.run(kept) == [["secret"], False, ""]
        assert "secret" not in page.run("return document.documentElement.outerHTML")
        page.click("#settings-toggle")
        page.click("#key-change")
        page.click("#key-forget")
        assert page.run(kept) == [[], False, ""]
        page.open("about:blank")


def test_browser_asks_for_the_key_of_a_guarded_server_once(page: Browser, tmp_path: Path) -> None:
    with serving("--api-key", "secret", log_file=tmp_path / "log") as server:
        refused = server.get("/")
        challenged = server.get("/v1/models", auth=("", "secret"))
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic realm=")
        assert challenged.headers["www-authenticate"] == "Bearer"
        # The user entered the password in the browser's dialog.
        page.open(server.url.replace("http://", "http://anyone:secret@") + "/")
        page.wait("document.querySelector('#model').value === name", name=MODEL)
        ask(page, "What is 47 + 38?")
        assert page.text(".problem") == ""
        assert "85" in page.text(".assistant .text")
        assert page.run("return sessionStorage.length") == 0
        page.wait("document.querySelector('#server').textContent.startsWith('0 running')")
        page.open(f"{server.url}/status")
        page.wait("Number(document.querySelector('#requests')?.textContent) > 0")
        assert page.problems == []
        page.open("about:blank")


def test_the_copied_command_repeats_the_request(page: Browser, script: Script) -> None:
    script.steps = [{"content": "Again"}]
    question = {"role": "user", "content": 'it\'s "quoted" $HOME `id` \\ !\n\u00e9'}
    request = {"model": NAME, "messages": [question], "stream": True}
    make = "return (await import('/playground/stream.js')).curlCommand(request, true)"
    command = ["sh", "-c", page.run(make, request=request)]
    environment = {"NEGAMAX_API_KEY": "k", **os.environ}
    done = subprocess.run(command, capture_output=True, check=True, env=environment)
    assert b'"Again"' in done.stdout
    assert script.bodies == [request]


def test_conversation_exports_and_imports(page: Browser, script: Script, tmp_path: Path) -> None:
    script.steps = [{"reasoning_content": "Hm."}, {"content": "Calling"}, *call("f", '{"n": 1}')]
    script.finish_reason = "tool_calls"
    page.write("[name=system]", "Be kind.")
    ask(page, "One")
    page.write(".call textarea", "done")
    say(page, script, "Fine", "and then?")
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.click("#export")
    file = tmp_path / "conversation.json"
    assert eventually(file.exists)
    kept = json.loads(file.read_text(encoding="utf-8"))
    roles = [message["role"] for message in kept["messages"]]
    assert roles == ["user", "assistant", "tool", "user", "assistant"]
    assert kept["settings"]["system"] == "Be kind."

    before = page.wait("location.hash")
    page.write("[name=system]", "")
    page.give_files("#import-file", file)
    page.wait("location.hash !== before", before=before)  # The page shows another conversation.
    assert page.count(".message") == 4
    ask(page, "Two")
    body = script.bodies[-1]["messages"]
    assert body[0] == {"role": "system", "content": "Be kind."}
    assert body[1:-1] == kept["messages"]
    broken = tmp_path / "broken.json"
    broken.write_text('{"messages": [{"role": "wizard"}]}')
    page.give_files("#import-file", broken)
    page.wait_for_text("#notice", 'Message 1 has the role "wizard".')
    # The earlier content is kept.
    assert page.count(".message") == 6


def test_controls_have_names_and_the_keyboard_reaches_them(page: Browser, script: Script) -> None:
    answer = [{"reasoning_content": "Hm."}, {"content": "`x`\n\n```\ny\n```"}]
    script.steps = [*answer, *call("f", "{}")]
    page.run(
        "const { Store } = await import('/playground/store.js'); "
        "Store.prototype.save = () => new Promise((then) => (window.saved = then));"
    )
    ask(page, "One")
    assert page.run(f"return {FOCUSED}") == "Result of f"
    page.click("#prompt")
    page.run("saved(); await new Promise((then) => setTimeout(then))")
    assert page.run(f"return {FOCUSED}") == "Your message"  # where the user moved the focus
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "combobox", "spinbutton", "checkbox", "link", "progressbar"}
    roles |= {"dialog"}
    controls = [node for node in nodes if not node["ignored"] and node["role"]["value"] in roles]
    assert len(controls) > 25
    assert all(node.get("name", {}).get("value") for node in controls)
    page.run("document.activeElement.blur()")
    reached = set()
    identity = "e.id || e.name || e.getAttribute('aria-label') || e.textContent"
    for _ in range(60):
        page.press("Tab")
        reached.add(page.run(f"const e = document.activeElement; return {identity}"))
    expected = {"prompt", "send", "model", "new", "theme", "settings-toggle", "temperature"}
    assert expected | {"tools", "thinking", "Result of f"} <= reached


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_windows_and_chosen_colours(page: Browser, script: Script, scheme: str) -> None:
    word = "x" * 300
    table = f"|{word}|b|\n|-|-|\n|c|d|"
    text = f"{word}\n\n```\n{word}\n```\n\n{table}"
    script.steps = [{"reasoning_content": word}, {"content": text}]
    script.steps += call(word, json.dumps({"a": word}))
    page.look(width=360, height=640, scheme=scheme)
    ask(page, word)
    assert page.get("html", "scrollWidth") == page.get("main", "scrollWidth") == 360
    assert page.get("th", "getBoundingClientRect().width") > 360  # Table cells keep words whole.
    for selector in ("#model", "#new", "#settings-toggle", "#prompt", "#send"):
        left = page.get(selector, "getBoundingClientRect().left")
        assert 0 <= left < page.get(selector, "getBoundingClientRect().right") <= 360, selector

    def is_dark() -> bool:
        color = page.run("return getComputedStyle(document.body).backgroundColor")
        return bool(color == "rgb(20, 22, 26)")

    assert is_dark() == (scheme == "dark")
    page.click("#theme")
    assert is_dark() != (scheme == "dark")
    page.click("#settings-toggle")
    page.shows("[name=temperature]")
    page.press("Escape")
    page.wait("!document.querySelector('#settings').checkVisibility()")


def test_the_files_come_with_their_policy_and_are_asked_for_anew(http: httpx.Client) -> None:
    answer = http.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert set(answer.headers["content-security-policy"].split("; ")) >= POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert http.head("/").headers["etag"] == answer.headers["etag"]
    again = http.get("/", headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    icons = ("style.css", "icon.svg", "vendor/temml.js", "vendor/LICENSES.txt")
    for name in ("app.js", "markdown.js", *icons):
        file = http.get(f"/playground/{name}")
        assert file.status_code == 200 and file.content, name
        plain = http.get(f"/playground/{name}", headers={"accept-encoding": "identity"})
        assert file.headers["content-encoding"] == "gzip"
        assert "content-encoding" not in plain.headers
        assert file.content == plain.content
    for path in ("__init__.py", "", "../server.py", "%2e%2e/server.py"):
        assert http.get(f"/playground/{path}").status_code == 404, path
    assert http.post("/").status_code == 405
