"""Checkpoints in this package: small trained models, and a draft model for each of them."""

from pathlib import Path

_ASSETS = Path(__file__).parent.parent / "assets"
# name -> folder; `ModelFamily.embedded` is the name of a family's model
EMBEDDED = {name: _ASSETS / name for name in ("nano", "nano-m3")}
EMBEDDED_DRAFTS = {name: _ASSETS / name for name in ("nano-draft", "nano-m3-draft")}
QUOTED_NAMES = " or ".join(map(repr, EMBEDDED))
