import json
import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from negamax.base.crash_dump import MAX_FILES, CrashDumps
from negamax.base.errors import EngineError
from tests.e2e.api_support import CHAT
from tests.e2e.conftest import eventually, serving
from tests.e2e.test_server_processes import ranks_of

SECRET = "zanzibar"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": f"Tell me of {SECRET}."}]}
BODY |= {"stop": [SECRET], "stream": True}
BODY |= {"ignore_eos": True, "max_tokens": 3900}  # The request runs until its engine is killed.


def dumps_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("crash-*.json"))


def test_killed_rank_dumps_without_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, key = tmp_path / "dumps", f"key-{SECRET}"
    monkeypatch.setenv("NEGAMAX_API_KEY", key)
    options = ("--crash-dump-dir", str(folder), "-tp", "2", "--max-engine-restarts", "0")
    with serving(*options, log_file=tmp_path / "log") as server, server.http() as http:
        headers = {"authorization": f"Bearer {key}"}
        with http.stream("POST", CHAT, json=BODY, headers=headers) as running:
            lines = running.iter_lines()
            next(lines)
            os.kill(ranks_of(server.engine_pid())[0], signal.SIGKILL)
            assert any('"error"' in line for line in lines)
        assert eventually(lambda: len(dumps_in(folder)) == 2)
        assert eventually(lambda: all(str(path) in server.log for path in dumps_in(folder)))
    for path in dumps_in(folder):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        text = path.read_text()
        assert SECRET not in text
        dump = json.loads(text)
        assert "rank 0" in dump["reason"] + "\n".join(dump["traceback"])
        assert dump["versions"]["negamax"] and dump["platform"]["machine"]
        assert dump["options"]["tensor_parallel_size"] == 2
        assert dump["options"]["serving_shape"]["parallel"]["tensor"] == 2
        assert dump["stats"]["num_kv_blocks"] > 0
        (request,) = dump["requests"]
        assert request["prompt_tokens"] > 5
        assert request["sampling"]["stop"] == 1 and request["sampling"]["max_tokens"] == 3900
    engine, server_side = (json.loads(path.read_text()) for path in dumps_in(folder))
    assert (engine["part"], server_side["part"]) == ("engine", "server")
    assert engine["last_plans"][-1]["slots"] == [engine["requests"][0]["slot"]]
    assert engine["requests"][0]["output_tokens"] >= 1
    assert any("the engine stops" in line for line in engine["log"])


def test_killed_engine_is_described_by_the_server(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    options = ("--crash-dump-dir", str(folder), "--max-engine-restarts", "0")
    with serving(*options, log_file=tmp_path / "log", rate=100) as server:
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert server.process.wait(120) == 1
    (path,) = dumps_in(folder)
    dump = json.loads(path.read_text())
    assert (dump["part"], dump["exit_code"], dump["signal"]) == ("server", -9, "SIGKILL")
    assert dump["requests"] == [] and dump["info"]["architecture"]


def test_a_step_that_fails_as_a_whole_leaves_one_dump(tmp_path: Path) -> None:
    from negamax import LLM, SamplingParams

    with LLM("nano", num_threads=1, crash_dump_dir=str(tmp_path), show_progress=False) as llm:
        worker = llm._loop.executor._worker  # type: ignore[attr-defined]

        def fails(*_: object) -> None:
            raise RuntimeError("out of memory")

        worker.launch = fails
        for _ in range(2):
            with pytest.raises(EngineError, match="RuntimeError"):
                llm.generate([f"Tell me of {SECRET}"], SamplingParams(max_tokens=3))
    (path,) = dumps_in(tmp_path)
    text = path.read_text()
    dump = json.loads(text)
    assert SECRET not in text
    assert dump["traceback"][-1] == "RuntimeError: out of memory"
    (new_row,) = dump["last_plans"][0]["new_rows"]
    assert new_row["prompt_tokens"] == dump["requests"][0]["prompt_tokens"] > 1


def test_the_number_of_dumps_is_bounded_and_a_repeated_failure_writes_one(tmp_path: Path) -> None:
    for number in range(MAX_FILES + 3):
        dumps = CrashDumps(str(tmp_path), part=f"part-{number}", options={})
        error = RuntimeError("broken")
        assert dumps.write("why", details=dict, error=error) is not None
        assert dumps.write("why", details=dict, error=error) is None
    names = [path.name for path in dumps_in(tmp_path)]
    assert len(names) == MAX_FILES and "part-22" in names[-1]
    assert "RuntimeError: broken" in json.loads((tmp_path / names[-1]).read_text())["traceback"]


def test_a_dump_that_cannot_be_written_raises_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def raises() -> dict[str, Any]:
        raise KeyError("state")

    folder = str(tmp_path / "file" / "folder")
    assert CrashDumps(folder, part="engine", options={}).write("why", details=dict) is None
    assert CrashDumps(str(tmp_path), part="engine", options={}).write("why", details=raises) is None
    assert CrashDumps("none", part="engine", options={}).write("why", details=dict) is None
    assert dumps_in(tmp_path) == []
