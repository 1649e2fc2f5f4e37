"""Downloads use the real hub clients with local hub servers."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hub_servers import COMMIT, TinyHub, TinyModelScope
from pyarrow import parquet

from negamax.base.errors import ConfigError, InvalidRequestError
from negamax.checkpoint import huggingface
from negamax.checkpoint.hub import resolve_model
from negamax.checkpoint.licence import log_licence
from negamax.config.embedded import EMBEDDED, EMBEDDED_DRAFTS
from negamax.evals import suites
from tests.tables import read_table

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
    "dspark/config.json": b"{}",
    "dspark/model.safetensors": b"draft",
    "README.md": b"readme",
}


KEPT = {
    "config.json", "tokenizer.json", "chat_template.jinja", "model-00000-of-00001.safetensors",
    "quant_model_description.json", "optional/quarot.safetensors",
}  # fmt: skip


@pytest.fixture
def hub() -> Iterator[TinyHub]:
    with TinyHub(FILES) as hub:
        yield hub


@pytest.fixture
def modelscope() -> Iterator[TinyModelScope]:
    with TinyModelScope(FILES) as server:
        yield server


def run_code(code: str, environment: Mapping[str, str], *arguments: object) -> tuple[str, str]:
    """Run code in a subprocess, which reads endpoints at import. Return output and log."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **environment}, capture_output=True, check=True, text=True, timeout=120,
    )  # fmt: skip
    return done.stdout, done.stderr


RESOLVE = """
import sys
from negamax.base.errors import NegamaxError
from negamax.checkpoint.hub import resolve_model
import negamax.base.progress
negamax.base.progress.LOG_SECONDS = 0.0
source, cache = sys.argv[1:3]
for argument in sys.argv[3:]:
    argument, _, folder = argument.partition(":")
    model, _, revision = argument.partition("@")
    place = revision or None, cache.strip(".") or None, source
    try:
        print(resolve_model(model, *place, subfolder=folder or None))
    except NegamaxError as error:
        print(type(error).__name__, error)
assert "torch" not in sys.modules
"""


def resolve_all(environment: Mapping[str, str], cache: Path, *models: str) -> list[str]:
    return run_code(RESOLVE, environment, "huggingface", cache, *models)[0].splitlines()


def resolve_from_modelscope(
    environment: Mapping[str, str], cache: Path, model: str = "lab/model"
) -> tuple[str, str]:
    environment = {"MODELSCOPE_CACHE": str(cache), **environment}
    output, logged = run_code(RESOLVE, environment, "modelscope", "", model)
    return output.strip(), logged


def assert_files(folder: Path, *more: str) -> None:
    """Check that the folder has the weights and JSON files, but no code and no pickles."""
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {*KEPT, *more}
    assert all((folder / name).read_bytes() == FILES[name] for name in KEPT)


def times_of(folder: Path) -> list[tuple[Path, int]]:
    return [(path, path.lstat().st_mtime_ns) for path in sorted(folder.rglob("*"))]


PROGRESS = r"fetching: [\d.]+ MiB of [\d.]+ MiB, .*/s, \d+ s left"


def test_download_offline_start_and_progress(hub: TinyHub, tmp_path: Path) -> None:
    home = {**hub.environment, "HF_HOME": str(tmp_path)}
    output, logged = run_code(RESOLVE, home, "huggingface", ".", "lab/model", f"lab/model@{COMMIT}")
    plain, pinned = output.splitlines()
    assert plain == pinned and Path(plain).is_relative_to(tmp_path / "hub")
    assert_files(Path(plain))
    assert set(hub.served) == KEPT
    lines = [line for line in logged.splitlines() if line.startswith("fetching: ")]
    assert lines and all(re.fullmatch(PROGRESS, line) for line in lines)
    # Files in the cache are not downloaded again, and also work offline and read-only.
    hub.served.clear()
    assert resolve_all(home, Path(), "lab/model") == [plain]
    files = sorted(tmp_path.rglob("*"))
    for path in files:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = times_of(tmp_path)
    try:
        assert resolve_all({**home, "HF_HUB_OFFLINE": "1"}, Path(), "lab/model") == [plain]
        assert times_of(tmp_path) == before and hub.served == []
    finally:
        for path in files:
            path.chmod(0o755)


def test_draft_in_a_subfolder_is_fetched_if_asked_for(
    hub: TinyHub, modelscope: TinyModelScope, tmp_path: Path
) -> None:
    (plain,) = resolve_all(hub.environment, tmp_path, "lab/model")
    assert_files(Path(plain))
    (folder,) = resolve_all(hub.environment, tmp_path, "lab/model:dspark")
    other, _ = resolve_from_modelscope(modelscope.environment, tmp_path / "m", "lab/model:dspark")
    for found in (folder, other):
        assert_files(Path(found), "dspark/config.json", "dspark/model.safetensors")


def test_hub_errors_are_one_line_with_a_remedy(hub: TinyHub, tmp_path: Path) -> None:
    refused = {
        "lab/nothing": ("does not exist on the hub, or is private", "check the name"),
        "lab/model@v9": ("at revision 'v9' does not exist on the hub", "check --revision"),
        "lab/gated": ("is gated on the hub", "hf auth login"),
        "lab/token": ("cannot be fetched: HfHubHTTPError", "check HF_TOKEN"),
        "lab/ill": ("the hub cannot be reached: HfHubHTTPError: Server error '500", "the network"),
    }
    lines = resolve_all(hub.environment, tmp_path, *refused)
    for line, (model, words) in zip(lines, refused.items(), strict=True):
        assert line.startswith(f"ConfigError model {model.partition('@')[0]!r} "), line
        assert all(word in line for word in words), line
    (tmp_path / "file").write_bytes(b"")
    (line,) = resolve_all(hub.environment, tmp_path / "file", "lab/model")
    assert line.startswith("ResourceError model 'lab/model' cannot be stored: ")
    assert "--download-dir" in line
    for offline in ({}, {"HF_HUB_OFFLINE": "1"}):
        nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", **offline}
        (line,) = resolve_all(nowhere, tmp_path, "lab/model")
        words = "is not in the local cache, and the hub cannot be reached"
        assert line.startswith(f"ConfigError model 'lab/model' {words}")
        assert "give a local folder" in line


ACCURACY = """
import sys
from negamax.cli.main import main
for place in sys.argv[1:]:
    data = ["--data", place] if place else []
    print(main(["bench", "accuracy", "--suite", "gsm8k", "--count", "3", *data]))
"""


def test_problems_come_from_the_hub(tmp_path: Path) -> None:
    """Request more problems than the files have, so that no model is loaded."""
    problem = b'{"question": "How many?", "answer": "#### 4"}\n'
    table = pyarrow.table({"question": ["How many?"] * 2, "answer": ["so 4\n#### 4"] * 2})
    parquet.write_table(table, tmp_path / "made.parquet")
    files = {
        "one.jsonl": problem,
        "a/two.jsonl": 2 * problem,
        "two.parquet": (tmp_path / "made.parquet").read_bytes(),
        "bad.parquet": b"no table",
    }
    folder = "hf://datasets/lab"
    places = [f"{folder}/data@v1/{name}" for name in (*files, "none.jsonl")]
    places += [f"{folder}/data/one.jsonl", f"{folder}/one.jsonl", ""]
    with TinyHub(files) as hub:
        environment = hub.environment | {"HF_HUB_CACHE": str(tmp_path)}
        codes, log = run_code(ACCURACY, environment, *places)
    assert hub.served == list(files) and codes.split() == ["2"] * 8
    lines = log.splitlines()
    assert "3 problems are requested; gsm8k has 1" in lines[0]
    assert all("3 problems are requested; gsm8k has 2" in line for line in lines[1:3])
    assert "bad.parquet': problem 1 is unreadable" in log
    assert log.count("data set 'lab/data' ") == 2 and "data set 'openai/gsm8k' " in log
    assert "use hf://datasets/OWNER/NAME/FILE or a local file" in log


def test_parquet_needs_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "find_spec", lambda name: None)
    with pytest.raises(InvalidRequestError, match="pyarrow"):
        suites.check_can_read(suites.GSM8K_ADDRESS)


def test_interrupted_download_keeps_complete_files(hub: TinyHub, tmp_path: Path) -> None:
    hub.cuts = 100
    (line,) = resolve_all(hub.environment, tmp_path, "lab/cut")
    assert line.startswith("ConfigError model 'lab/cut' cannot be fetched: RemoteProtocolError: ")
    assert "finished files are kept" in line
    hub.cuts = 0
    hub.served.clear()
    (folder,) = resolve_all(hub.environment, tmp_path, "lab/cut")
    assert_files(Path(folder))
    assert set(hub.served) == {
        "tokenizer.json", "model-00000-of-00001.safetensors", "optional/quarot.safetensors"
    }  # fmt: skip


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
    [("auto", "bitsandbytes", "ConfigError the checkpoint is quantized by 'bitsandbytes'"),
     ("synthetic", "fp8", "MiniMaxM2ForCausalLM")],
)  # fmt: skip
def test_weights_of_refused_or_synthetic_models_are_not_fetched(
    hub: TinyHub, tmp_path: Path, load_format: str, method: str, words: str
) -> None:
    config = json.loads((EMBEDDED["nano"] / "config.json").read_text())
    config["quantization_config"]["quant_method"] = method
    hub.files["config.json"] = json.dumps(config).encode()
    assert run_code(LOCATE, hub.environment, tmp_path, load_format)[0].startswith(words)
    assert "config.json" in hub.served and "model-00000-of-00001.safetensors" not in hub.served


@pytest.mark.parametrize(("model", "card", "line"), read_table("checkpoint_hub.cards"))
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
    output, logged = run_code(code, hub.environment)
    (found,) = (each for each in logged.splitlines() if each.startswith("licence of"))
    assert found.startswith("licence of lab/model: not named on the model's card, see ")
    assert "config.json" in output and "safetensors" not in output
    assert "model-00000-of-00001.safetensors" in hub.served


def test_local_folders_and_embedded_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "nano").mkdir()
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model("org/model") == Path("org/model")  # A folder precedes a hub id.
    for name, folder in (EMBEDDED | EMBEDDED_DRAFTS).items():  # The name precedes a folder.
        assert resolve_model(name) == folder and (folder / "config.json").is_file()
    assert resolve_model("./nano") == Path("nano")
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"is a file; a folder is needed .use /"):
        resolve_model(str(path))


@pytest.mark.parametrize(
    "model",
    ["", "nothing", "/does/not/exist", "./org/model", "a/b/c", "org/", "/model", "org/mo del",
     "../x/y", "a/..", "-x/y", "a/b\n", "a\0b", "~nobody-of-this-name/model", "x" * 10_000],
)  # fmt: skip
def test_invalid_names_are_refused_without_asking_the_hub(model: str) -> None:
    with pytest.raises(ConfigError, match="is neither an existing folder, nor 'nano'") as caught:
        resolve_model(model)
    assert repr(model[:200]) in str(caught.value) and "MiniMaxAI/MiniMax-M2" in str(caught.value)


# --- ModelScope -----------------------------------------------------------------------------------


def test_modelscope_download_offline_and_update(modelscope: TinyModelScope, tmp_path: Path) -> None:
    line, logged = resolve_from_modelscope(modelscope.environment, tmp_path)
    folder = Path(line)
    assert folder.is_relative_to(tmp_path)
    assert_files(folder)
    # The log shows the licence before weights are requested. The client itself logs nothing.
    *others, licence, one, other = modelscope.served
    assert {*others, one, other} == KEPT and licence == "licence"
    assert {one, other} == {"model-00000-of-00001.safetensors", "optional/quarot.safetensors"}
    (said,) = (each for each in logged.splitlines() if not re.fullmatch(PROGRESS, each))
    assert said == f"licence of lab/model: lab-1, see {modelscope.endpoint}/models/lab/model"
    assert re.match(PROGRESS, logged)
    # Files in the cache are not downloaded again. Offline, no request is made.
    modelscope.served.clear()
    assert resolve_from_modelscope(modelscope.environment, tmp_path) == (line, "")
    before = times_of(tmp_path)
    offline = {**modelscope.environment, "HF_HUB_OFFLINE": "1"}
    assert resolve_from_modelscope(offline, tmp_path) == (line, "")
    assert modelscope.served == [] and times_of(tmp_path) == before
    # The hub replaces a file by a later one of the same size.
    modelscope.files["config.json"] = changed = FILES["config.json"].replace(b"m2", b"m3")
    modelscope.changed = int(time.time()) + 1000
    assert resolve_from_modelscope(modelscope.environment, tmp_path)[0] == line
    assert modelscope.served == ["config.json", "licence"]
    assert (folder / "config.json").read_bytes() == changed


def test_modelscope_errors_name_remedies(modelscope: TinyModelScope, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for cache, model, offline, words in (
        ("", "lab/nothing", {}, "ConfigError model 'lab/nothing' does not exist on ModelScope"),
        ("", "lab/model", {"HF_HUB_OFFLINE": "1"},
         "ConfigError model 'lab/model' is not in ModelScope's cache; offline mode is on"),
        ("file", "lab/model", {}, "ResourceError model 'lab/model' cannot be stored: "),
    ):  # fmt: skip
        environment = {**modelscope.environment, **offline}
        line, _ = resolve_from_modelscope(environment, tmp_path / cache, model)
        assert line.startswith(words), line


@pytest.mark.parametrize("source", ["modelscope", "NEGAMAX_USE", "VLLM_USE", "SGLANG_USE"])
def test_missing_modelscope_is_explained(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setitem(sys.modules, "modelscope_hub", None)
    if source.endswith("_USE"):
        monkeypatch.setenv(f"{source}_MODELSCOPE", "True")
        source = "auto"
    with pytest.raises(ConfigError, match=r"pip install 'negamax\[modelscope\]'"):
        resolve_model("lab/model", source=source)
