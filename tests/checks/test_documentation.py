import ast
import contextlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer
import yaml

from negamax.cli.main import app
from negamax.cli.resolve import find_command, resolve
from negamax.models.registry import bundled_names
from tools import api_reference, cli_reference

ROOT = Path(__file__).parents[2]
ROOT_COMMAND = typer.main.get_command(app)
PAGES = sorted(
    page
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/*.md"),
                 *ROOT.glob("tools/**/*.md"), *ROOT.glob("nano/*.md"))
)  # fmt: skip

# Some pages exist only in the built site. The other pages of docs/ may link to such a page.
GENERATED = {ROOT / "docs" / page.PAGE: page.render for page in (api_reference, cli_reference)}

_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.*?) *$", re.MULTILINE)


@cache
def read(page: Path) -> str:
    """Return the text of a page. A generated page is rendered first."""
    return GENERATED[page]() if page in GENERATED else page.read_text(encoding="utf-8")


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors that a rendered page has for its headings."""
    text = re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)
    slugs: list[str] = []
    for heading in _HEADING.findall(text):
        words = re.sub(r"\]\([^)]*\)|[`*\[]", "", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        slugs.append(slug if slug not in slugs else f"{slug}-{slugs.count(slug)}")
    return frozenset(slugs)


@pytest.mark.parametrize(
    "page", [*PAGES, *GENERATED], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in _LINK.findall(_CODE.sub("", read(page))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        is_generated = target in GENERATED and page.is_relative_to(ROOT / "docs")
        is_there = is_generated or (target.exists() and target.is_relative_to(ROOT))
        if not is_there or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_modules_exist(page: Path) -> None:
    if "log" in page.parts:
        return
    named = re.findall(r"`((?!models/x/)\w+/[\w/]+\.py)`", page.read_text(encoding="utf-8"))
    folders = (ROOT, ROOT / "negamax", ROOT / "nano")
    assert [name for name in named if not any((each / name).exists() for each in folders)] == []


# Pages about the past may name removed commands and tools.
PAST = {"decisions", "log", "CHANGELOG.md"}
COMMANDS_OF = [page for page in PAGES if PAST.isdisjoint(page.parts)]


def blocks(page: Path, language: str) -> Iterator[str]:
    """Yield the code blocks of `page` in `language`, including indented blocks."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^( *)```(\w+)\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE):
        if match[2] == language:
            yield match[3]
    if language == "sh":
        fenced = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)
        yield "\n".join(re.findall(r"^ {4}(.*\S.*)$", fenced, re.MULTILINE))


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of every command on `page`.

    Commands are in code blocks. A command in the text has options and no placeholders.
    """
    lines = "\n".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    inline = re.findall(r"`(negamax [^`\n]+ --[^`\n]+)`", page.read_text(encoding="utf-8"))
    inline = [line for line in inline if not re.search(r"\.\.\.|\b[A-Z]+\b", line)]
    for line in (*lines, *inline):
        for part in re.split(r"\s(?:&&|\||&|;)(?:\s|$)|\s[<>]\s", line):
            if part.split()[:1] and part.split()[0] in ("negamax", "make", "python", "python3"):
                yield shlex.split(part, comments=True)


def understand(words: list[str]) -> None:
    """Parse a command line. Raises the error of a refusal."""
    resolved = resolve(ROOT_COMMAND, words)  # type: ignore[arg-type]
    command, path, rest = find_command(ROOT_COMMAND, resolved.words)  # type: ignore[arg-type]
    assert path, f"no command: {words}"
    with contextlib.suppress(typer.Exit):  # --help
        command.make_context(path[-1], list(rest))


@pytest.mark.parametrize("page", COMMANDS_OF, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_are_valid(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.toml").write_text('model = "nano"\n')
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in commands(page):
        match words:
            case ["make", *wanted]:
                assert [word for word in wanted if "=" not in word and word not in targets] == []
            case ["negamax", *rest]:
                understand(rest)
                assert not _lacks_weights(rest), words
            case [_, file, *_] if file.endswith(".py"):
                assert (ROOT / file).is_file(), file


def _lacks_weights(words: list[str]) -> bool:
    """Return whether the command serves a bundled specification, which has no weights."""
    is_bundled = words[:1] == ["serve"] and not {*bundled_names()}.isdisjoint(words[1:2])
    return is_bundled and "--load-format" not in words


def test_docker_commands_fit_the_image() -> None:
    """Parse the commands, because no test runs Docker."""
    recipe = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    (entry,) = re.findall(r"^ENTRYPOINT (.*)", recipe, re.MULTILINE)
    assert json.loads(entry)[-1] == "negamax"
    built, run = re.findall(r"^# +docker build .*-t (\S+) \.$", recipe, re.MULTILINE), []
    for page in COMMANDS_OF:
        text = "\n".join(blocks(page, "sh")).replace("\\\n", " ")
        for line in re.findall(r"^docker .*", text, re.MULTILINE):
            match shlex.split(line, comments=True)[1:]:
                case ["build", "-f", "deploy/Dockerfile", "-t", tag, "."]:
                    assert tag in built
                case ["run", *words]:
                    run.append(_read_docker_run(words))
                case _:
                    raise AssertionError(f"{page}: {line}")
    for options, image, words in run:
        assert image in built and words[0] == "serve"
        understand(words)
        assert {value.rpartition(":")[2] for value in options["-v"]} <= {
            *re.findall(r"^VOLUME (.*)", recipe, re.MULTILINE)
        }
        (port,) = (value.rpartition(":")[2] for value in options["-p"])
        assert port in re.findall(r"^EXPOSE (.*)", recipe, re.MULTILINE)
        assert options["--gpus"] and options["-e"] and (options["--ipc"] or options["--shm-size"])
    assert run


def _read_docker_run(words: list[str]) -> tuple[dict[str, list[str]], str, list[str]]:
    """Return the options, the image and the arguments of `docker run`."""
    names = ("--gpus", "--ipc", "--shm-size", "--sysctl", "-e", "-p", "-v")
    options: dict[str, list[str]] = {name: [] for name in names}
    while words[0].startswith("-"):
        name, equals, value = words.pop(0).partition("=")
        options[name].append(value if equals else words.pop(0))
    return options, words[0], words[1:]


@pytest.mark.parametrize("page", COMMANDS_OF, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_command_runs_into_the_next(page: Path) -> None:
    text = "\n".join(blocks(page, "sh"))
    assert re.findall(r"^.*[^\\\n]\n *--\w.*$|^.*\\ .*$|^.*\w python$", text, re.MULTILINE) == []


@pytest.mark.parametrize("page", COMMANDS_OF, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_and_data_can_be_read(page: Path) -> None:
    for language, read in (("python", ast.parse), ("json", json.loads), ("toml", tomllib.loads)):
        for block in blocks(page, language):
            read(block)


def test_commands_of_the_deployment_files_are_understood() -> None:
    for file in (ROOT / "deploy" / "compose").glob("*.yaml"):
        for command in _listed_commands(file):
            understand(command)
    for command in _listed_commands(ROOT / "deploy" / "kubernetes.yaml"):
        understand(command)


def _listed_commands(file: Path) -> Iterator[list[str]]:
    """Yield lists that begin with `serve`, anywhere in a YAML file."""
    waiting = list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
            if value[:1] == ["serve"]:
                yield value
