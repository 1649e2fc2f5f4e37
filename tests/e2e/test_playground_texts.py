import json
import time

import pytest

from tests.e2e.browser import Browser
from tests.e2e.chat_page import ask, say
from tests.e2e.scripted_server import Script, call
from tests.speed import is_linear
from tests.tables import read_table

HOSTILE = """<script>window.hit = 1</script><img src=x onerror="window.hit = 2"><iframe srcdoc="<script>parent.hit=3</script>">
</iframe><svg onload=window.hit=4><style>body{display:none}</style><a href="javascript:window.hit=5">x</a>

[a](javascript:window.hit=6) [b]( JaVaScRiPt:window.hit=7) [c](data:text/html,<script>hit=8</script>) [d](//evil.example/)
[e](https://evil.example/"onmouseover="window.hit=9) ![f](https://evil.example/beacon.png) <javascript:alert(1)>
[g](vbscript:x) [h](java\tscript:x) [i](&#106;avascript:x) [[j](javascript:x)](javascript:y) <https://ok.example/"><img src=x>

```"><img src=x onerror=window.hit=10>
</code></pre><script>window.hit = 11</script>
```

| <b>t</b> | <img src=x onerror=hit=12> |
|---|---|
| [k](javascript:x) | </td><script>hit=13</script> |
"""


def test_hostile_text_does_nothing(page: Browser, script: Script) -> None:
    pieces = call('x"><img src=x onerror=hit=20>', json.dumps({"a": HOSTILE}))
    error = {"error": {"message": HOSTILE, "code": "<b>"}}
    script.steps = [{"reasoning_content": HOSTILE}, {"content": HOSTILE}, *pieces, error]
    ask(page, HOSTILE)
    time.sleep(0.3)  # Any element that loads or runs has time to do so.
    shown = "return [window.hit, document.title, getComputedStyle(document.body).display]"
    assert page.run(shown) == [None, "scripted · Negamax", "grid"]
    elements = "[...document.querySelectorAll('#messages *')]"
    tags = page.run(f"return {elements}.map((e) => e.tagName.toLowerCase())")
    forbidden = {"script", "img", "iframe", "svg", "style", "object", "embed", "link", "form"}
    assert not (forbidden | {"base"}) & set(tags)
    names = page.run(f"return {elements}.flatMap((e) => e.getAttributeNames())")
    assert not {"style", "src", "srcdoc", "srcset", "action"} & set(names)
    assert not [name for name in names if name.startswith("on")]
    anchors = "[...document.querySelectorAll('#messages a')]"
    links = page.run(f"return {anchors}.map((a) => [a.protocol, a.rel, a.host])")
    assert {link[0] for link in links} == {"https:"}
    assert {link[1] for link in links} == {"noopener noreferrer nofollow"}
    assert {link[2] for link in links} == {"evil.example", "ok.example"}
    origin = page.run("return location.origin")
    urls = [request["url"] for request in page.requests]
    assert all(url.startswith((origin, "about:")) for url in urls)
    assert page.problems == []


def test_the_policy_blocks_scripts_images_and_requests(page: Browser, script: Script) -> None:
    with pytest.raises(AssertionError, match="TrustedHTML"):
        page.run("document.querySelector('#messages').innerHTML = '<b>x</b>'")
    with pytest.raises(AssertionError, match="TrustedScript"):
        page.run("document.querySelector('#messages').setAttribute('onclick', 'window.hit = 1')")
    page.run(
        "const i = document.createElement('img'); i.src = 'https://evil.example/'; "
        "document.body.append(i)"
    )
    fetched = "return fetch('https://evil.example/').then(() => 'sent', () => 'blocked')"
    assert page.run(fetched) == "blocked"
    assert any("Content Security Policy" in problem for problem in page.problems)


MARKDOWN = dict(read_table("playground_texts.markdown"))
PLAIN = """
  const { renderMarkdown } = await import('/playground/markdown.js');
  const box = document.createElement('div');
  box.append(renderMarkdown(text));
  for (const code of box.querySelectorAll('.code')) {
    const pre = document.createElement('pre');
    pre.textContent = `${code.querySelector('span').textContent}:${code.querySelector('code').textContent}`;
    code.replaceWith(pre);
  }
  for (const table of box.querySelectorAll('.table')) table.replaceWith(table.firstChild);
  for (const link of box.querySelectorAll('a')) for (const name of ['title', 'target', 'rel']) link.removeAttribute(name);
  return box.innerHTML;
"""


def test_markdown_and_formulas_become_the_elements_they_mean(page: Browser, script: Script) -> None:
    assert {text: page.run(PLAIN, text=text) for text in MARKDOWN} == MARKDOWN
    assert {text: page.run(FORMULA_SOURCES, text=text) for text in FORMULAS} == FORMULAS


FORMULAS = dict(read_table("playground_texts.formulas"))
FORMULA_SOURCES = PLAIN.replace(
    "return box.innerHTML",
    """
  for (const shown of box.querySelectorAll('.formula:not(.source)')) {
    const source = document.createElement(shown.classList.contains('display') ? 'd' : 'x');
    source.textContent = shown.querySelector('annotation').textContent;
    shown.replaceWith(source);
  }
  for (const source of box.querySelectorAll('.formula.source')) source.removeAttribute('title');
  return box.innerHTML""",
)


def test_formulas_are_laid_out_and_code_has_colours(page: Browser, script: Script) -> None:
    code = "```python\ndef f(x):\n    return 'a' + 1\n```\n\n```nosuch\nx\n```"
    say(page, script, f"\\[\\frac{{a}}{{b_1}}\\]\n\n{code}", "One")
    page.run("window.parts = document.querySelector('.formula mfrac').children")
    tops = page.run("return [...parts].map((part) => part.getBoundingClientRect().top)")
    assert tops[1] - tops[0] > 8  # The denominator is below the numerator.
    spans = "[...e.children].map((c) => c.className.replace('hljs-', ''))"
    colors = page.run(f"return [...document.querySelectorAll('.code code')].map((e) => {spans})")
    words = ["keyword", "title function_", "params", "keyword", "string", "number"]
    assert colors == [words, []]
    assert page.problems == []


def test_a_growing_text_ends_like_the_whole_text(page: Browser, script: Script) -> None:
    link = "[a][1]\n\n[1]: https://e.example/\n\nb"
    for text in (*MARKDOWN, *FORMULAS, link, "\n\n".join((*MARKDOWN, *FORMULAS))):
        same = page.run(
            """
            const { MarkdownView, renderMarkdown } = await import('/playground/markdown.js');
            const [grown, whole] = [document.createElement('div'), document.createElement('div')];
            const view = new MarkdownView(grown);
            for (let end = 1; end <= text.length; end += 1) view.show(text.slice(0, end));
            view.show(text, true);
            whole.append(renderMarkdown(text));
            return grown.innerHTML === whole.innerHTML;
            """,
            text=text,
        )
        assert same, text


def test_a_long_answer_streams_smoothly(page: Browser, script: Script) -> None:
    """The shown text of 80,000 characters must not slow the stream down."""
    part = (
        "## Step\n\nSome **bold** text with `code` and \\\\(x_1 + y\\\\), as long as paragraphs "
        "are.\n\n1. One\n   - two\n\n"
        "```python\ndef f(x):\n    return x + 1\n```\n\n|a|b|\n|-|-|\n|1|2|\n\n"
    )
    page.call("Performance.enable", timeDomain="threadTicks")
    early, late = page.run(
        """
        const { MarkdownView } = await import('/playground/markdown.js');
        const view = new MarkdownView(document.querySelector('#messages'));
        const text = part.repeat(80000 / part.length);
        const spent = [];
        for (let end = 0; end <= text.length; end += 64) {
          const start = performance.now();
          view.show(text.slice(0, end));
          spent.push(performance.now() - start);
        }
        const median = (list) => list.sort((a, b) => a - b)[list.length >> 1];
        return [median(spent.slice(0, 250)), median(spent.slice(-250))];
        """,
        part=part,
    )
    assert late < 4 * early + 1  # milliseconds, the median for a piece of 64 characters


LINKS = ("[", "![", "](", "[a](", "([", "[a]", "[a]: b\n")
ADDRESSES = ("<https://", "https://", "www.", "a@", "h")
EMPHASIS = ("*a ", "**a ", "_a", "*", "*a_", "~~", "a_", "`", "` `` ", "\\", "&")
BLOCKS = ("> ", ">\n", "  - ", "- a\n", "1. a\n", "- ", "-", "#", "# a\n", "\n", "\t")
FENCES = ("|", "a|b\n", "|-", "```a", "```\n")
MATHS = ("$", "$a ", "$$", "$$ ", "\\(", "\\[", "\\[\n", "$$\n", "\\(a\\) ")


@pytest.mark.parametrize("pieces", [LINKS, ADDRESSES, EMPHASIS, BLOCKS, FENCES, MATHS])
def test_no_text_freezes_the_page(page: Browser, script: Script, pieces: tuple[str, ...]) -> None:
    page.call("Performance.enable", timeDomain="threadTicks")
    for piece in pieces:

        def seconds(size: int, piece: str = piece) -> float:
            before = cpu_seconds_of(page)
            page.run(
                """
                const { renderMarkdown } = await import('/playground/markdown.js');
                const text = piece.repeat(size / piece.length);
                renderMarkdown(`a ${text} b`);
                renderMarkdown(text);
                """,
                piece=piece,
                size=size,
            )
            return cpu_seconds_of(page) - before

        assert is_linear(seconds, 20_000), piece


def cpu_seconds_of(page: Browser) -> float:
    metrics = page.call("Performance.getMetrics")["metrics"]
    return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))


def test_events_may_be_split_anywhere(page: Browser, script: Script) -> None:
    text = (
        'data: {"a": "\u00e9\U0001f600"}\r\n\r\n: note\n\ndata: 1\ndata: 2\n\nevent: '
        "x\ndata:3\n\ndata: [DONE]\n\ndata: 4\n\n"
    )
    wrong = page.run(
        """
        const { serverEvents } = await import('/playground/stream.js');
        const bytes = new TextEncoder().encode(text);
        const wrong = [];
        for (let cut = 0; cut <= bytes.length; cut += 1) {
          const parts = [bytes.slice(0, cut), bytes.slice(cut)];
          const body = new ReadableStream({ start(c) { parts.forEach((p) => p.length && c.enqueue(p)); c.close() } });
          const events = [];
          for await (const event of serverEvents(body)) events.push(event);
          if (JSON.stringify(events) !== JSON.stringify(['{"a": "\u00e9\U0001f600"}', '1\\n2', '3'])) wrong.push([cut, events]);
        }
        return wrong;
        """,
        text=text,
    )
    assert wrong == []
