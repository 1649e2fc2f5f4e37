"""The checkpoints inside the package: small, trained ones, that every tool takes for models of
their families, and for each of them a draft that guesses its tokens.
"""

from __future__ import annotations

from pathlib import Path

_ASSETS = Path(__file__).parent.parent / "assets"
# name -> folder; `ModelFamily.embedded` says which family has which
EMBEDDED = {name: _ASSETS / name for name in ("nano", "nano-m3")}
EMBEDDED_DRAFTS = {name: _ASSETS / name for name in ("nano-draft", "nano-m3-draft")}
QUOTED_NAMES = " or ".join(map(repr, EMBEDDED))
