"""Hooks of MkDocs that generate pages from the code and redirect links that leave docs/."""

import re
import sys
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools import api_reference, cli_reference

_LINK = re.compile(r"\]\(((?:\.\./)+[^)\s]*|results/[^)\s]*|\.\./results/[^)\s]*)\)")
_DOCS = PurePosixPath("docs")


def on_files(files: Any, *, config: Any) -> Any:
    """Add the reference pages."""
    for page in (api_reference, cli_reference):
        files.append(File.generated(config, page.PAGE, content=page.render()))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Point links that leave docs/, and links to raw results, to the repository."""
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
