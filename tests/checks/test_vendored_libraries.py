"""The chat page's libraries are small, licensed, and comply with the page's policy."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
VENDOR = ROOT / "negamax" / "api" / "playground" / "vendor"
MAX_BYTES = 600_000


def test_the_libraries_are_small_and_need_no_forbidden_means() -> None:
    modules = sorted(VENDOR.glob("*.js"))
    assert [module.name for module in modules] == ["highlight.js", "markdown.js", "temml.js"]
    assert sum(path.stat().st_size for path in VENDOR.iterdir()) < MAX_BYTES
    for module in modules:
        text = module.read_text(encoding="utf-8")
        assert "new Function(" not in text and "eval(" not in text, module.name


def test_every_library_has_its_version_and_licence() -> None:
    licences = (VENDOR / "LICENSES.txt").read_text(encoding="utf-8")
    package = json.loads(
        (ROOT / "tools" / "vendor_playground" / "package.json").read_text(encoding="utf-8")
    )
    for name, version in package["dependencies"].items():
        assert f"\n{name} {version} (" in licences, name
