"""The embedded checkpoints: small trained models, and a draft for each."""

from pathlib import Path

_ASSETS = Path(__file__).parent.parent / "assets"
# name -> folder; `ModelFamily.embedded` names the one of a family
EMBEDDED = {name: _ASSETS / name for name in ("nano", "nano-m3")}
EMBEDDED_DRAFTS = {name: _ASSETS / name for name in ("nano-draft", "nano-m3-draft")}
QUOTED_NAMES = " or ".join(map(repr, EMBEDDED))
