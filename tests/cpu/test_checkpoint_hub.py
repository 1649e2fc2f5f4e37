"""Model lookup: folders, nano and hub ids. Downloads use the real client and a local hub."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_hub import COMMIT, TinyHub, tiny_hub

from negamax.base.errors import ConfigError
from negamax.checkpoint import huggingface
from negamax.checkpoint.hub import resolve_model
from negamax.checkpoint.licence import log_licence
from negamax.config.embedded import EMBEDDED, EMBEDDED_DRAFTS

FILES = {
    "config.json": b'{"model_type": "minimax_m2"}',
    "tokenizer.json": b"{" + b" " * 2000 + b"}",
    "chat_template.jinja": b"{{ messages }}",
    "model-00000-of-00001.safetensors": b"\x02\0\0\0\0\0\0\0{}",
    "modeling_minimax_m2.py": b"raise SystemExit('remote code')",
    "pytorch_model.bin": b"pickle",
    "original/consolidated.safetensors": b"other",
    "quant_model_description.json": b'{"optional": {"quarot": {"rotation_map": '
    b'{"global_rotation": "optional/quarot.safetensors"}}}}',
    "optional/quarot.safetensors": b"rotation",
    "optional/other.safetensors": b"other",
    "README.md": b"readme",
}


@pytest.fixture
def hub() -> Iterator[TinyHub]:
    with tiny_hub(FILES) as hub:
        yield hub


RESOLVE = """
import sys
from negamax.base.errors import NegamaxError
from negamax.checkpoint.hub import resolve_model
for argument in sys.argv[2:]:
    model, _, revision = argument.partition("@")
    try:
        print(resolve_model(model, revision or None, sys.argv[1].strip(".") or None))
    except NegamaxError as error:
        print(type(error).__name__, error)
"""


def resolve_all(environment: Mapping[str, str], cache: Path, *models: str) -> list[str]:
    """Return one line per model, the folder or the error, from a subprocess.

    The client reads its endpoint at import.
    """
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, str(cache), *models],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=120,
    )
    return done.stdout.splitlines()


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_download_takes_weights_and_json_but_never_code_or_pickles(
    hub: TinyHub, tmp_path: Path
) -> None:
    plain, pinned = resolve_all(hub.environment, tmp_path, "lab/model", f"lab/model@{COMMIT}")
    folder = Path(plain)
    assert plain == pinned and folder.is_relative_to(tmp_path)
    kept = {
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model-00000-of-00001.safetensors",
        "quant_model_description.json",
        "optional/quarot.safetensors",
    }
    assert files_in(folder) == kept
    assert all((folder / name).read_bytes() == FILES[name] for name in kept)
    assert set(hub.served) == kept
    # Files in the cache are not fetched again and work offline.
    hub.served.clear()
    assert resolve_all(hub.environment, tmp_path, "lab/model") == [plain]
    assert resolve_all({**hub.environment, "HF_HUB_OFFLINE": "1"}, tmp_path, "lab/model") == [plain]
    assert hub.served == []


def test_download_without_a_terminal_logs_progress(hub: TinyHub, tmp_path: Path) -> None:
    code = "import negamax.base.progress; negamax.base.progress.LOG_SECONDS = 0.0" + RESOLVE
    command = [sys.executable, "-c", code, str(tmp_path), "lab/model"]
    environment = {**os.environ, **hub.environment}
    done = subprocess.run(
        command, env=environment, capture_output=True, check=True, text=True, timeout=120
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("fetching: ")]
    assert lines and all(
        re.fullmatch(r"fetching: [\d.]+ MiB of [\d.]+ MiB, .*/s, \d+ s left", line)
        for line in lines
    )


def test_hub_errors_are_one_line_with_a_remedy(hub: TinyHub, tmp_path: Path) -> None:
    refused = {
        "lab/nothing": ("is not on the hub, or private", "check the name"),
        "lab/model@v9": ("at revision 'v9' does not exist on the hub", "check --revision"),
        "lab/gated": ("is gated on the hub", "hf auth login"),
        "lab/token": ("cannot be fetched: HfHubHTTPError", "check HF_TOKEN"),
        "lab/ill": (
            "the hub cannot be reached: HfHubHTTPError: Server error '500",
            "check the network",
        ),
    }
    lines = resolve_all(hub.environment, tmp_path, *refused)
    for line, (model, words) in zip(lines, refused.items(), strict=True):
        assert line.startswith(f"ConfigError model {model.partition('@')[0]!r} "), line
        assert all(word in line for word in words), line


def test_interrupted_download_keeps_complete_files(hub: TinyHub, tmp_path: Path) -> None:
    hub.cuts = 100
    (cut,) = resolve_all(hub.environment, tmp_path, "lab/cut")
    assert cut.startswith("ConfigError model 'lab/cut' cannot be fetched: RemoteProtocolError: "), (
        cut
    )
    assert "finished files are kept" in cut
    hub.cuts = 0
    hub.served.clear()
    (folder,) = resolve_all(hub.environment, tmp_path, "lab/cut")
    assert (Path(folder) / "tokenizer.json").read_bytes() == FILES["tokenizer.json"]
    assert set(hub.served) == {
        "tokenizer.json", "model-00000-of-00001.safetensors", "optional/quarot.safetensors"
    }  # fmt: skip


def test_read_only_cache_is_used_offline(hub: TinyHub, tmp_path: Path) -> None:
    home = {**hub.environment, "HF_HOME": str(tmp_path / "home")}
    (folder,) = resolve_all(home, Path(), "lab/model")
    assert Path(folder).is_relative_to(tmp_path / "home" / "hub")
    files = sorted((tmp_path / "home").rglob("*"))
    for path in files:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = [(path, path.lstat().st_mtime_ns) for path in files]
    hub.served.clear()
    try:
        assert resolve_all({**home, "HF_HUB_OFFLINE": "1"}, Path(), "lab/model") == [folder]
        after = [
            (path, path.lstat().st_mtime_ns) for path in sorted((tmp_path / "home").rglob("*"))
        ]
    finally:
        for path in files:
            path.chmod(0o755)
    assert after == before and hub.served == []


LOCATE = """
import sys
from negamax.base.errors import NegamaxError
from negamax.options.engine import EngineOptions
from negamax.engine.core.source import locate
options = EngineOptions("lab/model", download_dir=sys.argv[1], load_format=sys.argv[2])
try:
    print(locate(options).spec.architecture)
except NegamaxError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("load_format", "method", "words"),
    [("auto", "bitsandbytes", "ConfigError the checkpoint is quantised by 'bitsandbytes'"),
     ("synthetic", "fp8", "MiniMaxM2ForCausalLM")],
)  # fmt: skip
def test_weights_of_refused_or_synthetic_models_are_not_fetched(
    hub: TinyHub, tmp_path: Path, load_format: str, method: str, words: str
) -> None:
    config = json.loads((EMBEDDED["nano"] / "config.json").read_text())
    config["quantization_config"]["quant_method"] = method
    hub.files = {**FILES, "config.json": json.dumps(config).encode()}
    done = subprocess.run(
        [sys.executable, "-c", LOCATE, str(tmp_path), load_format],
        env={**os.environ, **hub.environment},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    assert done.stdout.startswith(words)
    assert "config.json" in hub.served and "model-00000-of-00001.safetensors" not in hub.served


CARDS = [
    ("lab/model", {}, r"not named on the model's card, see {hub}/lab/model"),
    ("lab/model", {"license": "mit"}, r"mit, see {hub}/lab/model"),
    (
        "lab/model",
        {"license": "other", "license_name": "lab-1", "license_link": "LICENSE-MODEL"},
        r"lab-1, see {hub}/lab/model/blob/{commit}/LICENSE-MODEL",
    ),
    (
        "lab/model",
        {"license_name": "m", "license_link": "https://x/y", "base_model": "X/MiniMax-M2.7"},
        r"m, see https://x/y; it prohibits commercial use without a prior written .* MiniMax",
    ),
    ("lab/MiniMax-M2.7", {"license": "other"}, r"other, see {hub}/lab/MiniMax-M2.7; it proh.*"),
]


@pytest.mark.parametrize(("model", "card", "line"), CARDS)
def test_licence_lines(
    hub: TinyHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    model: str,
    card: dict[str, Any],
    line: str,
) -> None:
    from huggingface_hub import constants

    hub.card, endpoint = card, hub.environment["HF_ENDPOINT"]
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    licence = huggingface._licence(model, tmp_path / COMMIT)
    assert licence is not None
    with caplog.at_level("INFO", logger="negamax"):
        log_licence(model, licence)
    said = line.replace("{hub}", re.escape(endpoint)).replace("{commit}", COMMIT)
    assert re.fullmatch(f"licence of {model}: {said}", caplog.messages[-1])


def test_licence_is_logged_once_before_the_weights(hub: TinyHub, tmp_path: Path) -> None:
    code = f"""
import urllib.request
from negamax.checkpoint import hub, huggingface
say = huggingface.log_licence
def asked(*arguments):
    say(*arguments)
    print(urllib.request.urlopen("{hub.environment["HF_ENDPOINT"]}/served").read().decode())
huggingface.log_licence = asked
for _ in range(2):
    hub.resolve_model("lab/model", None, "{tmp_path}")
"""
    environment = {**os.environ, **hub.environment}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True, text=True
    )
    (found,) = (each for each in done.stderr.splitlines() if each.startswith("licence of"))
    assert found.startswith("licence of lab/model: not named on the model's card, see ")
    assert "config.json" in done.stdout and "safetensors" not in done.stdout
    assert "model-00000-of-00001.safetensors" in hub.served


def test_full_disk_is_one_line_with_a_remedy(hub: TinyHub, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (line,) = resolve_all(hub.environment, tmp_path / "file", "lab/model")
    assert (
        line.startswith("ResourceError model 'lab/model' cannot be stored: ")
        and "--download-dir" in line
    )


def test_no_network_is_one_line_with_a_remedy(tmp_path: Path) -> None:
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    (unreachable,) = resolve_all(nowhere, tmp_path, "lab/model")
    (offline,) = resolve_all({**nowhere, "HF_HUB_OFFLINE": "1"}, tmp_path, "lab/model")
    for line in (unreachable, offline):
        assert line.startswith(
            "ConfigError model 'lab/model' is not in the local cache and the hub cannot be reached"
        )
        assert "give a local folder" in line


def test_local_folders_and_embedded_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "nano").mkdir()
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model("org/model") == Path("org/model")  # a folder precedes a hub id
    for name, folder in (EMBEDDED | EMBEDDED_DRAFTS).items():  # embedded models precede folders
        assert resolve_model(name) == folder and (folder / "config.json").is_file()
    assert resolve_model("./nano") == Path("nano")


@pytest.mark.parametrize(
    "model",
    [
        "",
        "nothing",
        "/does/not/exist",
        "./org/model",
        "a/b/c",
        "org/",
        "/model",
        "org/mo del",
        "../x/y",
        "a/..",
        "-x/y",
        "a/b\n",
        "a\0b",
        "~nobody-of-this-name/model",
        "x" * 10_000,
    ],
)
def test_invalid_names_are_refused_without_asking_the_hub(model: str) -> None:
    with pytest.raises(ConfigError, match="is neither an existing folder, nor 'nano'") as caught:
        resolve_model(model)
    assert repr(model[:200]) in str(caught.value) and "MiniMaxAI/MiniMax-M2" in str(caught.value)


def test_file_instead_of_a_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file; give the folder"):
        resolve_model(str(path))
