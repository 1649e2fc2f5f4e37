"""What the rendered documentation needs beside the files in docs/: links to other files of the
repository lead to the repository, and the decisions are listed without being named one by one."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from posixpath import normpath
from typing import Any

_LINK = re.compile(r"\]\(((?:\.\./)+[^)\s]*|results/[^)\s]*|\.\./results/[^)\s]*)\)")
_DOCS = PurePosixPath("docs")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Turn relative links that leave docs/, and links to raw results, into links to the
    repository.
    """
    folder = _DOCS / PurePosixPath(page.file.src_uri).parent

    def outside(match: re.Match[str]) -> str:
        path, _, anchor = match[1].partition("#")
        target = normpath(str(folder / path))
        if target.startswith("docs/") and not target.startswith("docs/results"):
            return match[0]
        kind = "blob" if PurePosixPath(target).suffix else "tree"
        anchor = f"#{anchor}" if anchor else ""
        return f"]({config['repo_url']}/{kind}/main/{target}{anchor})"

    return _LINK.sub(outside, markdown)
