import errno
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from loading_support import (
    FILES,
    KV_SCALE,
    assert_equal,
    conversion,
    edited,
    load,
    stored_bytes,
    write_source,
)
from m2_checkpoints import CONFIG, random_tensors, tiny_spec
from safetensors.torch import load_file, save_file
from stored_formats import FORMATS, sample, write

from negamax.base.errors import CheckpointError, ConfigError, ResourceError
from negamax.checkpoint.reader import CheckpointReader
from negamax.cli.main import main
from negamax.config.json_file import read_json_object
from negamax.config.quantization import PROVENANCE
from negamax.convert import convert as converting
from negamax.convert.convert import convert
from negamax.convert.source import Source
from negamax.convert.targets import TARGETS, find_target
from negamax.convert.verify import compare
from negamax.convert.writer import TensorFile
from negamax.models.registry import read_spec
from tests import quantization_descriptions as described
from tests.layouts import full


@pytest.fixture(scope="module")
def converted(bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("converted")
    folders = {name: root / name for name in TARGETS}
    for name, folder in folders.items():
        convert(conversion(bf16, folder, name))
    return folders


@pytest.mark.parametrize("name", TARGETS)
def test_target_error_is_as_stated(name: str, bf16: Path, converted: dict[str, Path]) -> None:
    source = Source(bf16)
    linear = {weight.name for weight in source.weights if weight.is_linear}
    changed = {one.name: one.error for one in compare(source, converted[name]) if one.error}
    assert set(changed) <= linear
    if name != "bf16":
        assert changed and all("experts" in one or "_proj" in one for one in changed)
        mean = sum(changed.values()) / len(changed)
        assert 0.8 * find_target(name).error < mean < 1.05 * find_target(name).error
        assert max(changed.values()) < find_target(name).limit
    made, scheme = Source(converted[name]), find_target(name).scheme()
    assert set(made.formats) == set(scheme.formats if scheme else ())
    router = next(w for w in made.weights if w.name.endswith("gate.weight"))
    assert router.move.entries[0].dtype == "F32"


def pairs() -> Iterator[Any]:
    """Yield pairs of formats. The gate converts each format to bf16, to itself or to one other."""
    firsts = [name for name in TARGETS if name != "bf16"]
    for number, (first, other) in enumerate(zip(firsts, firsts[1:] + firsts[:1], strict=True)):
        gate = ("bf16", first, other)[number % 3]
        for target in TARGETS:
            yield pytest.param(first, target, marks=() if target == gate else pytest.mark.full)


@pytest.mark.parametrize(("first", "target"), list(pairs()))
def test_from_each_format_to_each(
    first: str, target: str, bf16: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    convert(conversion(converted[first], tmp_path / "again", target))
    error = find_target(first).limit + find_target(target).limit
    assert all(one.error < error for one in compare(Source(bf16), tmp_path / "again"))
    if target == "bf16":  # The values are those of a device that dequantizes when it loads.
        folders = converted[first], tmp_path / "again"
        assert_equal(*(load(folder, dtype=torch.bfloat16)[1] for folder in folders))
    if first == target:
        for file in sorted(converted[first].glob("*.safetensors")):
            assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("name", sample(FORMATS, 1, 8))
def test_every_published_format_is_converted_and_split(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 2}
    tensors, source = random_tensors(tiny_spec(**sizes)), tmp_path / "source"
    source.mkdir()
    plain = write(source, {**CONFIG, **sizes}, tensors, FORMATS[name])
    convert(conversion(source, tmp_path / "bf16", "bf16", allow_lossy=False))
    for weight in Source(tmp_path / "bf16").weights:
        with CheckpointReader() as reader:
            found = weight.read(reader)["weight"]
        assert torch.equal(found.float(), plain[weight.name].to(found.dtype).float()), weight.name
    assert not (tmp_path / "bf16" / "quant_model_description.json").exists()
    convert(conversion(source, tmp_path / "split", tp=2))
    assert not any(one.error for one in compare(Source(source), tmp_path / "split"))
    convert(conversion(tmp_path / "split", tmp_path / "joined"))
    assert not any(one.error for one in compare(Source(source), tmp_path / "joined"))


def test_nvfp4_gate_and_up_share_a_global_scale(bf16: Path, converted: dict[str, Path]) -> None:
    tensors = load_file(converted["nvfp4"] / "model-00000-of-00003.safetensors")
    source = {weight.name: weight for weight in Source(bf16).weights}
    for expert in range(2):
        prefix = f"model.layers.0.block_sparse_moe.experts.{expert}"
        with CheckpointReader() as reader:
            largest = {
                name: source[f"{prefix}.{name}.weight"].read(reader)["weight"].abs().max().item()
                for name in ("w1", "w2", "w3")
            }
        whole = {name: tensors[f"{prefix}.{name}.weight_global_scale"] for name in largest}
        assert whole["w1"] == whole["w3"] != whole["w2"]
        assert whole["w1"].item() == pytest.approx(2688 / max(largest["w1"], largest["w3"]))
        assert largest["w1"] != largest["w3"]


def test_fnuz_and_ocp_blocks_convert_exactly(converted: dict[str, Path], tmp_path: Path) -> None:
    """Include values that the other format cannot represent."""
    for first, to in (("fp8-block", "fp8-fnuz"), ("fp8-fnuz", "fp8-block")):
        for largest, error in ((None, 0.0), (0x70, 0.0), (0x7F, 1e-4 if to == "fp8-block" else 1)):
            source = tmp_path / f"from {first} {largest}"
            shutil.copytree(converted[first], source)
            for file in source.glob("*.safetensors") if largest else ():
                with edited(file) as tensors:
                    for tensor in tensors.values():
                        if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
                            bits = tensor.view(torch.uint8)
                            bits.copy_(bits & 0x80 | (bits & 0x7F).clamp_(max=largest))
                            bits[0, 0] = largest
                            if first == "fp8-fnuz":
                                bits[bits == 0x80] = 0  # NaN
            out = tmp_path / f"{to} {largest}"
            if error == 1:  # NaN
                with pytest.raises(CheckpointError, match="NaN"):
                    convert(conversion(source, out, to, allow_lossy=False))
                continue
            convert(conversion(source, out, to, allow_lossy=False))
            assert all(one.error <= error for one in compare(Source(source), out))


def test_fnuz_blocks_named_ocp_are_converted(converted: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(converted["fp8-fnuz"], source)
    config = read_json_object(source / "config.json")
    config["quantization_config"]["fmt"] = "float8_e4m3fn"
    (source / "config.json").write_text(json.dumps(config))
    convert(conversion(source, tmp_path / "out", "fp8-block", allow_lossy=False))
    dtypes = {w.move.entries[0].dtype for w in Source(tmp_path / "out").weights if w.is_linear}
    assert dtypes == {"F8_E4M3"}
    assert all(one.error == 0 for one in compare(Source(source), tmp_path / "out"))


def test_copies_side_files(bf16: Path, converted: dict[str, Path]) -> None:
    folder = converted["fp8-block"]
    names = {path.name for path in folder.iterdir()}
    files = [f"model-{number:05d}-of-00003.safetensors" for number in range(3)]
    assert names == {
        *files, "config.json", "model.safetensors.index.json", "tokenizer.json",
        "chat_template.jinja",
    }  # fmt: skip
    assert load_file(folder / files[1])[KV_SCALE] == 0.25
    assert set(load_file(folder / files[2])) == {
        "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
    }  # fmt: skip
    config = read_json_object(folder / "config.json")
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    made = config[PROVENANCE]
    assert made["source"] == str(bf16) and made["to"] == "fp8-block" and made["source_digest"]
    assert not any(PROVENANCE in note for note in read_spec(config).notes)
    plain = read_json_object(converted["bf16"] / "config.json")
    assert "quantization_config" not in plain and plain["dtype"] == "bfloat16"


def test_code_and_source_descriptions_are_not_copied(tmp_path: Path) -> None:
    """Other engines would load the code that config.json names, or use an old description."""
    source = write_source(tmp_path / "source")
    config = read_json_object(source / "config.json")
    config["auto_map"] = {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"}
    (source / "config.json").write_text(json.dumps(config))
    left = (
        "configuration_minimax_m2.py", "pytorch_model.bin", "pytorch_model.bin.index.json",
        "quantize_config.json", "quant_config.json", "quantization_config.json",
    )  # fmt: skip
    for name in (*left, "tokenizer_config.json"):
        (source / name).write_text("{}")
    convert(conversion(source, tmp_path / "out", "int8"))
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert "tokenizer_config.json" in found and not found & set(left)
    assert "auto_map" not in read_json_object(tmp_path / "out" / "config.json")


def stop_at(call: int, stop: Callable[[], object]) -> Any:
    calls = iter(range(1, 10**9))

    def progress(done: int, total: int) -> None:
        if next(calls) == call:
            stop()

    return progress


def interrupt(source: Path, out: Path, to: str) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(conversion(source, out, to), progress=stop_at(20, stop))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("after", "num_kept"), [full(1, 0), (17, 1), full(35, 2)])
def test_killed_conversion_resumes(
    after: int, num_kept: int, bf16: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    kill = stop_at(after, lambda: os.kill(os.getpid(), signal.SIGKILL))
    run = partial(convert, conversion(bf16, out, "int4"), progress=kill)
    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert not (out / "config.json").exists()
    kept = {path: path.stat().st_ino for path in out.glob("*.safetensors")}
    convert(conversion(bf16, out, "int4"))
    assert contents(out) == contents(converted["int4"])
    assert all(path.stat().st_ino == node for path, node in kept.items())
    assert len(kept) == num_kept


def test_damaged_file_is_rewritten(bf16: Path, converted: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupt(bf16, out, "int4")
    (file,) = out.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    convert(conversion(bf16, out, "int4"))
    assert contents(out) == contents(converted["int4"])


def test_complete_conversion_is_not_repeated(bf16: Path, converted: dict[str, Path]) -> None:
    before = {p: p.stat().st_mtime_ns for p in converted["int8"].iterdir()}
    convert(conversion(bf16, converted["int8"], "int8"))
    renamed = conversion(bf16, converted["int8"], "int8", allow_lossy=False)
    convert(replace(renamed, model="by another name"))
    assert {p: p.stat().st_mtime_ns for p in converted["int8"].iterdir()} == before


@pytest.mark.parametrize(
    ("first", "to", "message"),
    [
        ("fp8-block", "fp8-block", "is already fp8-block"),
        ("bf16", "bf16", "is already bf16"),
        ("int4", "fp8-block", r"already quantized .*int4.* error of about 2\.7%.*--allow-lossy"),
        ("fp8-block", "int4", r"a second time and add a relative error of about 11\.1%"),
    ],
)
def test_lossy_or_pointless_path_is_refused(
    first: str, to: str, message: str, converted: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(conversion(converted[first], tmp_path / "out", to, allow_lossy=False))
    assert not (tmp_path / "out").exists()


def test_unusable_destinations_are_refused(
    bf16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for destination, message in (
        (bf16 / "out", "is inside the source"),
        (bf16, "is inside the source"),
        (tmp_path, "contains unrelated files: file"),
        (tmp_path / "file", "is not a folder"),
        (tmp_path / "link", "is not a folder"),
    ):
        (tmp_path / "file").write_text("")
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to("nowhere")
        with pytest.raises(ConfigError, match=message):
            convert(conversion(bf16, destination, "int8"))
    monkeypatch.setattr(converting, "_SPARE_BYTES", 2**60)
    with pytest.raises(ResourceError, match=r"needs \d+\.\d GiB of disk space; .* are free"):
        convert(conversion(bf16, tmp_path / "out", "int8"))


def test_nan_in_the_source_is_refused(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    with edited(source / FILES[0]) as tensors:
        name = next(name for name in tensors if ".experts.1.w3" in name)
        tensors[name][3, 5] = torch.nan
    with pytest.raises(CheckpointError, match=rf"NaN or infinite: {name}"):
        convert(conversion(source, tmp_path / "out", "fp8-block"))


@pytest.mark.parametrize("to", ["int8", full("bf16"), "fp8-neuron"])
def test_holes_are_refused(to: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write_source(tmp_path / "source", tensor_dtype=torch.float32)
    file = source / FILES[0]
    tensors = load_file(file)
    pruned = [name for name in tensors if ".experts.1." in name]
    save_file(tensors | {name: torch.zeros_like(tensors[name]) for name in pruned}, file)
    convert(conversion(source, tmp_path / "done", to))
    lines = [record.getMessage() for record in caplog.records if "only zeros" in record.msg]
    assert lines and all(any(name in line for line in lines) for name in pruned)
    save_file(tensors, file)
    data = bytearray(file.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"00000-of-00009.safetensors has a hole: "):
        convert(conversion(source, tmp_path / "begun", to))


def test_conversion_of_another_source_or_target_is_not_resumed(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    convert(conversion(source, tmp_path / "done", "int8"))
    interrupt(source, tmp_path / "begun", "int8")
    with pytest.raises(CheckpointError, match=r"another conversion \(different: to\)"):
        convert(conversion(source, tmp_path / "begun", "int4"))
    with edited(source / FILES[0]) as tensors:
        for tensor in tensors.values():
            tensor.neg_()
    with pytest.raises(ConfigError, match=r"another conversion \(different: source_digest\)"):
        convert(conversion(source, tmp_path / "done", "int8"))
    with pytest.raises(ConfigError, match="is inside the source"):
        convert(conversion(tmp_path / "done", tmp_path / "done", "int8"))
    with pytest.raises(CheckpointError, match=r"another conversion \(different: source_digest\)"):
        convert(conversion(source, tmp_path / "begun", "int8"))


def refuse_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_loses_only_the_file_being_written(
    bf16: Path, converted: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, left, out = TensorFile.write, iter([True] * 30), tmp_path / "out"

    def write_some(*arguments: Any) -> None:
        (write if next(left, False) else refuse_space)(*arguments)

    monkeypatch.setattr(TensorFile, "write", write_some)
    with pytest.raises(ResourceError, match=r"out cannot be written: No space left"):
        convert(conversion(bf16, out, "int8"))
    assert [path.name for path in out.glob("*.safetensors")] == ["model-00000-of-00003.safetensors"]
    monkeypatch.undo()
    convert(conversion(bf16, out, "int8"))
    assert stored_bytes(out) == stored_bytes(converted["int8"])


def test_disk_full_at_the_start_leaves_no_obstacle(
    bf16: Path, converted: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a partial record remains, and a new run works."""
    out = tmp_path / "out"
    monkeypatch.setattr(os, "fsync", refuse_space)
    with pytest.raises(ResourceError, match="run the command again"):
        convert(conversion(bf16, out, "int8"))
    monkeypatch.undo()
    assert [path.name for path in out.iterdir()] == ["negamax_conversion.json.partial"]
    convert(conversion(bf16, out, "int8"))
    assert contents(out) == contents(converted["int8"])


def test_second_rounding_is_refused_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refuse a second rounding, even if only attention or no weight keeps its values."""

    blocks = described.group(
        described.E4M3_BLOCKS, targets=["re:.*self_attn.*"], stored="float-quantized"
    )
    ints = described.group({"group_size": 32}, targets=["re:.*experts.*"], stored="pack-quantized")
    ignore = ["lm_head", "re:.*gate$"]
    mixed = described.compressed("mixed-precision", blocks, ints, ignore=ignore)
    config = {**CONFIG, "dtype": "bfloat16", "quantization_config": mixed}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = []

    def resolve(model: str, *more: Any, check: Any) -> Path:
        asked.append((model, *more))
        check(tmp_path)
        raise ConfigError("weights are fetched")

    monkeypatch.setattr("negamax.cli.convert.resolve_model", resolve)
    line = ["convert", "lab/model", str(tmp_path / "out"), "--source", "modelscope"]
    for to, more, words in (
        ("fp8-fnuz", [], "(fp8_e4m3_block_128x128, packed_int4_group_32); --to fp8-fnuz"),
        ("int4", [], "already quantized (packed_int4_group_32); --to int4 would round"),
        ("int4", ["--allow-lossy"], "weights are fetched"),
        ("bf16", [], "weights are fetched"),
    ):
        assert main([*line, "--to", to, *more]) == 2
        assert words in capsys.readouterr().err
    assert asked[0] == ("lab/model", None, None, "modelscope")
    assert main([*line[:-1], "x", "--to", "bf16"]) == 2
    assert "--source is 'x'; allowed: auto, huggingface, modelscope" in capsys.readouterr().err


def test_two_conversions_do_not_share_a_folder(bf16: Path, tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        with pytest.raises(ConfigError, match="another process is converting to"):
            convert(conversion(bf16, tmp_path / "out", "int8"))

    convert(conversion(bf16, tmp_path / "out", "int8"), progress=progress)


def peak(sources: list[Path], results: Any) -> None:
    used = []
    for number, source in enumerate(sources):
        out = source.parent / f"out{number}"
        compare(convert(conversion(source, out, "fp8-block")), out)
        used.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    results.put(used[1] - used[0])


def test_memory_is_at_most_two_layers(tmp_path: Path) -> None:
    """Compare the conversion of three layers of real matrix counts with that of a tiny model."""
    sizes = {
        "num_hidden_layers": 3, "intermediate_size": 512, "num_local_experts": 40,
        "vocab_size": 20_000,  # The head is a third of a layer, as in M2.
    }  # fmt: skip
    few = {**sizes, "num_hidden_layers": 1, "num_local_experts": 4, "vocab_size": 64}
    sources = [write_source(tmp_path / "few", **few), write_source(tmp_path / "many", **sizes)]
    layer = sum(weight.move.num_bytes for weight in Source(sources[1]).read_layer(0))
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=peak, args=(sources, results))
    child.start()
    added = results.get(timeout=300)
    child.join()
    shutil.rmtree(tmp_path)
    assert layer > 30 * 2**20 and added < 2 * layer


def test_non_utf8_paths_work(bf16: Path, tmp_path: Path) -> None:
    out, again = os.fsdecode(os.fsencode(tmp_path) + b"/\xff"), tmp_path / "again"
    line = [sys.executable, "-m", "negamax", "convert", str(bf16), out, "--to", "fp8-channel"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path}/\\udcff: {bf16} as FP8")
    made = json.loads((Path(out) / "config.json").read_bytes().decode())
    assert "\ufffd' --to fp8-channel" in made[PROVENANCE]["command"]
    assert main(["convert", out, str(again), "--to", "bf16"]) == 0


def test_command_prints_its_plan_and_verifies_each_value(
    bf16: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, other, name = tmp_path / "out", str(tmp_path / "b"), "model.embed_tokens.weight"
    line = ["convert", str(bf16), str(out), "--to", "fp8-channel", "--verify"]
    assert main(line) == 0
    shown = capsys.readouterr().out
    assert "fp8_e4m3_channel" in shown and "farthest from the source" in shown
    assert isinstance(read_json_object(out / "config.json")[PROVENANCE]["command"], str)
    file = out / "model-00002-of-00003.safetensors"
    with edited(file) as tensors:
        tensors[name][3, 5] += 1
    changed = ["convert", str(out), other, "--to"]
    for arguments, status, words in (
        (line, 1, f"1 weights have errors that are too large for their format: {name}"),
        ([*changed, "int8"], 2, "--allow-lossy"),
        ([*changed, "int9"], 2, "int9"),
    ):
        assert main(arguments) == status
        assert words in capsys.readouterr().err
    file.unlink()
    assert main(line[:-1]) == 2
    assert f"1 cannot be found: {file.name}" in capsys.readouterr().err
