"""Checkpoints bundled with Negamax: small trained models, each with a draft model."""

from pathlib import Path

_ASSETS = Path(__file__).parent.parent / "assets"
# model name -> folder; `ModelFamily.embedded` contains the model name of a family
EMBEDDED = {name: _ASSETS / name for name in ("nano", "nano-m3")}
EMBEDDED_DRAFTS = {name: _ASSETS / name for name in ("nano-draft", "nano-m3-draft")}
QUOTED_NAMES = " or ".join(map(repr, EMBEDDED))
