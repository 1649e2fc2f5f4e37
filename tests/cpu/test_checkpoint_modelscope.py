import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tiny_modelscope import TinyModelScope, tiny_modelscope

from negamax.base.errors import ConfigError
from negamax.checkpoint.hub import resolve_model

FILES = {
    "config.json": b'{"model_type": "minimax_m2"}',
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
KEPT = {
    "config.json", "chat_template.jinja", "model-00000-of-00001.safetensors",
    "quant_model_description.json", "optional/quarot.safetensors",
}  # fmt: skip
RESOLVE = """
import sys
from negamax.base.errors import NegamaxError
from negamax.checkpoint.hub import resolve_model
import negamax.base.progress
negamax.base.progress.LOG_SECONDS = 0.0
for model in sys.argv[1:]:
    try:
        print(resolve_model(model, source="modelscope"))
    except NegamaxError as error:
        print(type(error).__name__, error)
assert "torch" not in sys.modules
"""


@pytest.fixture
def server() -> Iterator[TinyModelScope]:
    with tiny_modelscope(FILES) as server:
        yield server


def resolve_all(environment: Mapping[str, str], cache: Path, *models: str) -> tuple[list[str], str]:
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, *models],
        env={**os.environ, "MODELSCOPE_CACHE": str(cache), **environment},
        capture_output=True,
        check=True,
        text=True,
        timeout=120,
    )
    return done.stdout.splitlines(), done.stderr


def test_download_offline_start_and_updated_branch(server: TinyModelScope, tmp_path: Path) -> None:
    (line,), logged = resolve_all(server.environment, tmp_path, "lab/model")
    folder = Path(line)
    assert folder.is_relative_to(tmp_path)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {str(path.relative_to(folder)) for path in files} == KEPT
    assert all((folder / name).read_bytes() == FILES[name] for name in KEPT)
    # The licence is logged before weights are requested; the client logs nothing.
    *others, licence, one, other = server.served
    assert {*others, one, other} == KEPT and licence == "licence"
    assert {one, other} == {"model-00000-of-00001.safetensors", "optional/quarot.safetensors"}
    endpoint = server.environment["MODELSCOPE_ENDPOINT"]
    progress = re.compile(r"fetching: [\d.]+ MiB of [\d.]+ MiB, .*/s, \d+ s left")
    (said,) = (each for each in logged.splitlines() if not progress.fullmatch(each))
    assert said == f"licence of lab/model: lab-1, see {endpoint}/models/lab/model"
    assert progress.match(logged)
    # Files in the cache are not fetched again; offline, no request is made.
    server.served.clear()
    assert resolve_all(server.environment, tmp_path, "lab/model") == ([line], "")
    before = [(path, path.stat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))]
    offline = {**server.environment, "HF_HUB_OFFLINE": "1"}
    assert resolve_all(offline, tmp_path, "lab/model") == ([line], "")
    assert server.served == []
    assert before == [(path, path.stat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))]
    # A file of the same size, committed later.
    server.files["config.json"] = changed = FILES["config.json"].replace(b"m2", b"m3")
    server.changed = int(time.time()) + 1000
    assert resolve_all(server.environment, tmp_path, "lab/model")[0] == [line]
    assert server.served == ["config.json", "licence"]
    assert (folder / "config.json").read_bytes() == changed


def test_errors_are_one_line_with_a_remedy(server: TinyModelScope, tmp_path: Path) -> None:
    (line,), _ = resolve_all(server.environment, tmp_path, "lab/nothing")
    assert line.startswith("ConfigError model 'lab/nothing' is not on ModelScope, or private")
    offline = {**server.environment, "HF_HUB_OFFLINE": "1"}
    (line,), _ = resolve_all(offline, tmp_path, "lab/model")
    assert line.startswith("ConfigError model 'lab/model' is not in ModelScope's local cache")
    (tmp_path / "file").write_bytes(b"")
    (line,), _ = resolve_all(server.environment, tmp_path / "file", "lab/model")
    assert line.startswith("ResourceError model 'lab/model' cannot be stored: "), line


@pytest.mark.parametrize("is_asked_by_variable", [True, False])
def test_missing_client_package_names_the_install_command(
    monkeypatch: pytest.MonkeyPatch, is_asked_by_variable: bool
) -> None:
    monkeypatch.setitem(sys.modules, "modelscope_hub", None)
    if is_asked_by_variable:
        monkeypatch.setenv("NEGAMAX_USE_MODELSCOPE", "1")
    with pytest.raises(ConfigError, match=r"pip install 'negamax\[modelscope\]'"):
        resolve_model("lab/model", source="auto" if is_asked_by_variable else "modelscope")
