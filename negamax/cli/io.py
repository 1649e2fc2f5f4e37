"""Read the input and print the output of commands."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from negamax.base.errors import ConfigError
from negamax.base.progress import CLEAR_LINE

if TYPE_CHECKING:
    from negamax.options.engine import EngineOptions
    from negamax.scheduler.request import SamplingParams

_ANY_VOCABULARY = 2**31  # upper bound of token ids while the model is unknown


def print_line(text: str, *, indent: int = 0) -> None:
    """Print a line, and wrap the line if the output is a terminal.

    Further lines begin with `indent` spaces, at most a third of the width. Words are not split.
    """
    if not sys.stdout.isatty():
        print(text)
        return
    width = shutil.get_terminal_size().columns
    whole: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    further = " " * min(indent, width // 3)
    print(textwrap.fill(text, width=width, subsequent_indent=further, **whole))


def print_json(answer: Any) -> None:
    """Print `answer` as one line of JSON in UTF-8, in any locale."""
    try:
        line = json.dumps(answer, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # the answer contains a lone surrogate, which UTF-8 cannot encode
        line = json.dumps(answer).encode()
    sys.stdout.flush()
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.flush()


def read_text() -> str:
    """Read standard input as UTF-8. Raises `ConfigError` for invalid UTF-8."""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is 0x{error.object[error.start]:02x}"
        raise ConfigError(f"standard input is not UTF-8: {byte}") from None


def read_tools(path: Path) -> list[dict[str, Any]]:
    """Read the file of --tools, a JSON list of tools as in a request. Raises `ConfigError`."""
    try:
        tools = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"--tools {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--tools {path} is not JSON: {error}") from None
    if tools is None:
        return []
    if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools):
        return tools
    is_list = isinstance(tools, list)
    found = "a list of other values" if is_list else f"a JSON {type(tools).__name__}"
    hint = "write a list such as `tools` in a request"
    raise ConfigError(f"--tools {path} is {found}; a list of tool objects is needed", hint=hint)


def check_sampling(sampling: SamplingParams, engine: EngineOptions) -> None:
    """Raise `InvalidRequestError` for sampling parameters that no model accepts."""
    sampling.check(max_logprobs=engine.max_logprobs, vocab_size=_ANY_VOCABULARY)


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Show a line on a terminal until the model is loaded or `base.progress` replaces the line."""
    is_shown = sys.stderr.isatty()
    if is_shown:
        print(f"loading {model} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if is_shown:
            print(CLEAR_LINE, end="", file=sys.stderr, flush=True)
