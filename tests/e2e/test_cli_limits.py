import json
import resource
import shutil
from pathlib import Path

import pytest

from negamax.base.supervision import Supervised
from negamax.cli.main import main
from negamax.config.embedded import EMBEDDED
from tests.e2e.conftest import MODEL, eventually
from tests.e2e.test_cli_commands import FAST, negamax

LONG = "b" * 300
HELLO = "--prompt Hello --max-tokens 2"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main(arguments)
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert (code, out) == (2, ""), line
    return line


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"generate nano --seed {10**30}", "000; allowed: -9223372036854775808 to 92"),
        ("generate nano --num-threads 10000", "--num-threads is 10000; allowed: 1 to 1024"),
        (
            f"generate nano --num-threads 1 {HELLO} --max-num-seqs {10**6}",
            "lower --max-num-seqs or --max-model-len",
        ),
        (f"serve nano --chat-template {LONG}", "300 characters; the system allows 255 bytes"),
        (f"generate {LONG} {HELLO}", "neither an existing folder"),
        (f"generate nano {HELLO} --script {LONG}", "the system allows 255 bytes"),
    ],
)
def test_refuses_large_values(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refused(capsys, *line.split())


def test_context_length_beyond_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(EMBEDDED["nano"], tmp_path / "nano")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2**31 - 1}))
    line = refused(capsys, "generate", str(folder), *FAST, *HELLO.split())
    assert "64 sequences of up to 2147483647 tokens need" in line
    assert "lower --max-num-seqs or --max-model-len" in line


def test_too_few_files_may_be_open() -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))

    done = negamax("serve", MODEL, "--port", "0", preexec_fn=few)
    words = "this process can open 20 files; at least 128 are needed (raise the limit (ulimit -n))"
    assert (done.returncode, done.stderr) == (2, f"negamax: error: {words}\n")


def test_children_do_not_inherit_api_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NEGAMAX_API_KEY", "OPENAI_API_KEY", "NEGAMAX_OTHER"):
        monkeypatch.setenv(name, "secret-value")
    child = Supervised("code")
    try:
        environ = Path(f"/proc/{child.pid}/environ")  # The file is empty until the child runs.
        assert eventually(lambda: bool(environ.read_bytes()))
        inherited = environ.read_bytes().split(b"\0")
    finally:
        child.kill()
        child.reap()
    found = [word for word in inherited if b"secret-value" in word]
    assert found == [b"NEGAMAX_OTHER=secret-value"]
