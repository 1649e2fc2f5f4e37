import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from negamax.cli.doctor_models import Gpu, Machine, ModelVerdict
from negamax.cli.doctor_models import verdict as verdict_of
from negamax.cli.main import main
from negamax.config.embedded import EMBEDDED
from negamax.planner.gpus import GIB

M2 = "MiniMaxAI/MiniMax-M2"


def machine(count: int, *, gib: float = 0, used: float = 0.5, **own: Any) -> Machine:
    total = int(gib * GIB)
    arch = own.pop("amd_arch", None)
    gpu = Gpu("GPU", total, total - int(used * GIB), own.pop("capability", (9, 0)), arch)
    facts: dict[str, Any] = {"memory_bytes": 64 * GIB, "cpu_bfloat16": True, "disk_bytes": 2**50}
    return Machine(gpus=(gpu,) * count, **{**facts, **own})


def verdict(here: Machine, model: str = M2) -> ModelVerdict:
    found = verdict_of(model.removeprefix("MiniMaxAI/").lower(), here)
    assert found.model == model
    return found


@pytest.mark.parametrize(
    ("here", "command"),
    [
        (machine(4, gib=139.8), f"negamax serve {M2} --tensor-parallel-size 4"),
        (machine(8, gib=79.1), f"negamax serve {M2} --tensor-parallel-size 8"),
        # Padded experts leave no memory for a cache; whole experts do.
        (machine(8, gib=48), f"negamax serve {M2} --tensor-parallel-size 8 --enable-expert-pa"),
        (machine(1, gib=287), f"negamax serve {M2}"),
        (machine(2, gib=139.8), f"negamax serve {M2} --tensor-parallel-size 2 --max-model-len"),
        (machine(0, memory_bytes=500 * GIB), f"negamax serve {M2}"),
    ],
)
def test_model_that_fits_has_a_command(here: Machine, command: str) -> None:
    found = verdict(here)
    assert found.runs and found.command.startswith(command)
    if "--max-model-len" in command:
        # The engine accepts this limit; on these GPUs its cache was measured to hold 122,496
        # tokens.
        assert 110_000 < int(found.command.split()[-1]) < 122_496


@pytest.mark.parametrize(
    ("model", "count", "words"),
    [
        ("MiniMaxAI/MiniMax-M3", 8, "bf16 as stored, 101.2 GiB of weights per GPU"),
        ("MiniMaxAI/MiniMax-M3-MXFP8", 4, "MXFP8 as stored, 104.7 GiB of weights per GPU"),
    ],
)
def test_m3_fits(model: str, count: int, words: str) -> None:
    found = verdict(machine(count, gib=139.8), model)
    assert found.command.startswith(f"negamax serve {model} --tensor-parallel-size {count} --max-m")
    assert words in found.detail
    assert ("; never measured on more than 4 GPUs" in found.detail) == (count > 4)
    fewer = verdict(machine(count // 2, gib=139.8), model)
    assert not fewer.runs and f"it takes about {count} free GPUs" in fewer.detail


@pytest.mark.parametrize(
    ("here", "words"),
    [
        (machine(1, gib=139.8), "it takes about 2 free GPUs like these"),
        (machine(3, gib=79.1), "it takes about 4 free GPUs like these"),
        (machine(8, gib=79.1, capability=(7, 5)), "no bfloat16 arithmetic"),
        (machine(4, gib=139.8, used=100), "39.8 GiB are free per GPU"),
        (machine(0), "needs 426.1 GiB of main memory in bf16"),
        (machine(0, cpu_bfloat16=False), "needs 851.9 GiB of main memory in fp32"),
    ],
)
def test_model_that_does_not_fit_has_a_reason(here: Machine, words: str) -> None:
    found = verdict(here)
    assert not found.runs and not found.command and words in found.detail


@pytest.mark.parametrize(
    ("here", "words"),
    [
        (machine(8, gib=79.1), "35.7 GiB of weights per GPU"),
        (machine(4, gib=139.8), "; measured on H200 only"),
        (machine(8, gib=79.1), "33% more bytes and arithmetic in the experts (no padding with"),
        # GPUs without FP8 matrix multiplication keep the weights packed in FP8.
        (machine(16, gib=79.1, capability=(8, 0)), "FP8 as stored, 35.7 GiB of weights"),
        (machine(4, gib=139.8, disk_bytes=60 * GIB), "a download needs 214."),
    ],
)
def test_details_name_padding_packing_and_disk(here: Machine, words: str) -> None:
    assert verdict(here).runs and words in verdict(here).detail
    assert "arithmetic" not in verdict(machine(4, gib=139.8)).detail


@pytest.mark.parametrize("name", EMBEDDED)
def test_an_embedded_model_runs_everywhere_with_a_gigabyte(name: str) -> None:
    assert verdict(machine(0), name).command == f"negamax serve {name}"
    old = machine(1, gib=40, capability=(7, 5))
    assert verdict(old, name).command == f"negamax serve {name} --device cpu"
    assert not verdict(machine(0, memory_bytes=GIB // 2), name).runs


def test_amd_gpus_are_judged_by_their_architecture() -> None:
    found = verdict(machine(2, gib=191.7, amd_arch="gfx942"))
    assert found.command == f"negamax serve {M2} --tensor-parallel-size 2"
    assert "FP8 as stored" in found.detail and "never measured on such a GPU" in found.detail
    assert "gfx906) is an unknown AMD GPU" in verdict(machine(8, gib=64, amd_arch="gfx906")).detail


@pytest.mark.parametrize(
    "body",
    [
        "raise OSError('libcudart.so.13 is missing')",
        pytest.param("import os; os.abort()", marks=pytest.mark.full),
    ],
)
def test_broken_torch_is_a_finding(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("negamax.base.env.installed_version", lambda name: "0.0.1")
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    for name in ("HF_HOME", "TRITON_CACHE_DIR"):  # The doctor counts the bytes of these folders.
        monkeypatch.setenv(name, str(tmp_path / "hub"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["doctor", "--json", "--port", str(port)]) == 1
        report = json.loads(capsys.readouterr().out)
        assert main(["doctor", "--port", str(port)]) == 1
    found = {check["name"]: check for check in report["checks"]}
    assert not report["can_serve"] and report["models"] == []
    assert found["torch"]["status"] == "fail"
    assert ("libcudart.so.13" if "OSError" in body else "exit code -6") in found["torch"]["detail"]
    assert found["numpy"]["detail"].startswith("0.0.1, not tested; allowed: ")
    assert found["numpy"]["status"] == "warn"
    assert found["port"]["status"] == "warn" and str(port) in found["port"]["detail"]
    assert found["HF_TOKEN"]["detail"] == "set"
    assert found["hub"]["detail"].startswith(str(tmp_path / "hub" / "hub"))
    text = capsys.readouterr().out
    assert "FAIL  torch" in text and "none: see the lines marked FAIL" in text
    assert "hf_verysecret" not in text + json.dumps(report)


def test_installation_that_lacks_a_package_still_has_its_doctor(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise ModuleNotFoundError(\"No module named 'msgspec'\")")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "negamax", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    served = run("serve", "nano")
    assert served.returncode == 1
    (line,) = served.stderr.splitlines()
    assert "No module named 'msgspec'" in line and "`negamax doctor`" in line
    seen = run("doctor")
    assert seen.returncode == 1
    assert "FAIL  negamax" in seen.stdout and "No module named 'msgspec'" in seen.stdout
    assert "torch " in seen.stdout and not seen.stderr
