import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from m2_checkpoints import (
    FP8_CONFIG,
    SlotModel,
    load_weights,
    random_tensors,
    save_sharded,
    save_single,
    tiny_spec,
    to_fp8,
    write_index,
)
from model_support import build
from stored_kernels import KEEPING
from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.checkpoint.identity import compute_identity
from negamax.checkpoint.plan import plan_load
from negamax.checkpoint.quarot import read_rotation
from negamax.checkpoint.reader import CheckpointReader, read_entries, read_header
from negamax.config.json_file import read_json_object
from negamax.config.model_spec import ModelSpec
from negamax.text.chat_template import ChatTemplate
from negamax.text.tokenizer import Tokenizer

SPEC = tiny_spec()
FP8_SPEC = tiny_spec(quantization_config=FP8_CONFIG)


def load(folder: Path, spec: ModelSpec = SPEC, *, dtype: torch.dtype = torch.float32) -> None:
    load_weights(SlotModel(spec, dtype=dtype).weight_slots(), spec, folder)


def refused(
    folder: Path, tensors: dict[str, Tensor], message: str, *, spec: ModelSpec = SPEC
) -> None:
    save_single(folder, tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(folder, spec)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


GATE = "model.layers.0.block_sparse_moe.gate.weight"
BIAS, K_PROJ = "model.layers.0.self_attn.q_proj.bias", "model.layers.1.self_attn.k_proj.weight"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
SCALE = f"{Q_PROJ}_scale_inv"
BIASES = "model.layers.0.block_sparse_moe.e_score_correction_bias"
EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
FORMAT = "fp8_e4m3_block_128x128"
Tensors = dict[str, Tensor]
MISFITS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "missing tensor": (
        lambda t: {name: each for name, each in t.items() if name != "model.norm.weight"},
        r"^1 tensor is missing from the checkpoint: model\.norm\.weight \(",
    ),
    "missing tensors": (
        lambda t: {n: t[n] for n in t if "layers.1" not in n and n != "model.norm.weight"},
        r"23 tensors are missing from the checkpoint: model\.norm\.weight, .* and 13 more",
    ),
    "unknown tensor": (
        lambda t: {**t, BIAS: torch.zeros(64)},
        r"1 tensor is not part of this model: model\.layers\.0\.self_attn\.q_proj\.bias",
    ),
    "two spellings": (
        lambda t: {**t, GATE.replace("block_sparse_moe", "mlp"): t[GATE].clone()},
        "both hold the weight " + GATE,
    ),
    "shape": (
        lambda t: {**t, K_PROJ: torch.zeros(48, 32)},
        r"k_proj\.weight has shape \[48, 32\]; config.json requires \[32, 48\]",
    ),
    "undeclared FP8": (to_fp8, "has dtype F8_E4M3; .*no quantization_config"),
}
MISFITS |= {
    f"dtype {dtype}": (
        lambda t, dtype=dtype: {**t, "lm_head.weight": t["lm_head.weight"].to(dtype)},
        r"lm_head\.weight has dtype .*; supported: BF16, F16, F32",
    )
    for dtype in (torch.int8, torch.float64, torch.float8_e5m2)
}


@pytest.mark.parametrize("name", MISFITS)
def test_misfits_are_named(tmp_path: Path, name: str) -> None:
    change, message = MISFITS[name]
    refused(tmp_path, change(random_tensors(SPEC)), message)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (SCALE, None, rf"{Q_PROJ} has the format {FORMAT}, but {SCALE} is missing"),
        (Q_PROJ, torch.zeros(64, 48), rf"{Q_PROJ} has dtype F32; {FORMAT} is stored in F8_E4M3"),
        (SCALE, torch.ones(2, 1), r"scale_inv has shape \[2, 1\]; config.json requires \[1, 1\]"),
        (
            SCALE, torch.ones(1, 1, dtype=torch.uint8),
            rf"scale_inv has dtype U8; {FORMAT} is stored in F32",
        ),
        (
            SCALE, torch.full((1, 1), torch.nan),
            rf"infinite: {SCALE} in 1 of 1 x 1 \(F32\), first at \[0, 0\]: nan",
        ),
        (SCALE, torch.zeros(1, 1), rf"scales that are 0, .*: {SCALE} in 1 of .*: 0 "),
        (
            SCALE, torch.full((1, 1), -2.0),
            rf"scales that are .*negative.*: {SCALE} in 1 of .*: -2 ",
        ),
        (
            "lm_head.weight_scale_inv", torch.ones(1, 1),
            r"not part of this model: lm_head\.weight_scale_inv .config.json .* not quantized",
        ),
        (
            "model.norm.bias_scale_inv", torch.ones(1),
            r"not part of this model: model\.norm\.bias_scale_inv",
        ),
    ],
)  # fmt: skip
def test_broken_scales_refused(
    tmp_path: Path, name: str, tensor: Tensor | None, message: str
) -> None:
    changed = to_fp8(random_tensors(SPEC)) | {name: tensor}
    kept = {key: each for key, each in changed.items() if each is not None}
    refused(tmp_path, kept, message, spec=FP8_SPEC)


def test_checkpoint_with_more_layers_than_its_config_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_spec(num_hidden_layers=4))
    message = r"config.json is 2, but the checkpoint has 44 tensors of .* layer 3 "
    refused(tmp_path, tensors, message + r"\(first: model\.layers\.[23]\.")
    tensors["model.layers.2.enorm.weight"] = torch.ones(48)  # Layer 2 predicts further tokens.
    refused(tmp_path, tensors, r"has 22 tensors .* up to layer 3 .*set num_hidden_layers to 4")
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(48, 96)
    load(save_single(tmp_path, tensors))


@pytest.mark.parametrize(
    ("name", "where", "dtype", "value"),
    [
        ("model.embed_tokens.weight", (95, 47), torch.float32, torch.nan),
        ("model.layers.1.self_attn.k_norm.weight", (31,), torch.bfloat16, torch.inf),
        (BIASES, (2,), torch.float16, -torch.inf),
        ("model.layers.1.block_sparse_moe.gate.weight", (1, 0), torch.float32, -torch.inf),
        (EXPERT, (4, 5), torch.bfloat16, torch.nan),
        (EXPERT, (0, 0), torch.float16, torch.inf),
    ],
)
def test_non_finite_values_are_named_counted_and_located(
    tmp_path: Path, name: str, where: tuple[int, ...], dtype: torch.dtype, value: float
) -> None:
    tensors = random_tensors(SPEC, dtype=dtype)
    tensors[name][where] = value
    size = " x ".join(map(str, tensors[name].shape))
    refused(tmp_path, tensors, rf"{name} in 1 of {size} \(\w+\), first at \{list(where)}")


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_fp8_nan_is_found_in_dequantized_and_kept_weights(tmp_path: Path, code: int) -> None:
    stored = to_fp8(random_tensors(SPEC))
    stored[EXPERT].view(torch.uint8)[[3, 7], [20, 1]] = code
    message = rf"{EXPERT} in 2 of 48 x 24 \(F8_E4M3\), first at \[3, 20\]"
    refused(tmp_path, stored, message, spec=FP8_SPEC)
    slots = build(FP8_SPEC, kernels=KEEPING, loaded=False).weight_slots()
    assert f"{EXPERT}_scale_inv" in slots
    with pytest.raises(CheckpointError, match=message):
        load_weights(slots, FP8_SPEC, tmp_path)


LARGE = tiny_spec(vocab_size=96, hidden_size=256, intermediate_size=64)


@pytest.mark.parametrize(
    ("first", "last", "dtype"),
    [(0.5, 1.0, torch.bfloat16), (0.3, 0.6, torch.float32), (0.0, 0.4, torch.bfloat16)],
)
def test_file_with_hole_is_refused(
    tmp_path: Path, first: float, last: float, dtype: torch.dtype
) -> None:
    save_single(tmp_path, random_tensors(LARGE, dtype=dtype))
    load(tmp_path, LARGE)
    file = tmp_path / "model.safetensors"
    data, begin = bytearray(file.read_bytes()), min(each.offset for each in read_header(file))
    size = len(data) - begin
    start, stop = begin + int(first * size), begin + int(last * size)
    data[start:stop] = bytes(stop - start)
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"safetensors has a hole: .*weight holds only zeros"):
        load(tmp_path, LARGE)


def test_warns_of_intended_zeros(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = random_tensors(LARGE)
    experts = [name for name in tensors if ".layers.1." in name and ".experts.2." in name]
    for name in (*experts, "model.layers.0.self_attn.q_norm.weight"):
        tensors[name].zero_()
    tensors["model.embed_tokens.weight"][40:] = 0
    tensors["model.layers.0.block_sparse_moe.e_score_correction_bias"].zero_()
    load(save_single(tmp_path, tensors), LARGE)
    (line,) = (record.getMessage() for record in caplog.records if "zeros" in record.msg)
    assert line.startswith("3 matrices hold only zeros: ") and all(name in line for name in experts)


def test_broken_tensors_are_reported_together_up_to_a_limit(tmp_path: Path) -> None:
    tensors = random_tensors(SPEC)
    for name in tensors:
        if re.search(r"layers\.0\..*experts\.\d\.w[13]", name):
            tensors[name].fill_(torch.nan)
    message = r"(experts\.\d\.w[13]\.weight in 1152 of 24 x 48.*){5}; and 3 more tensors"
    refused(tmp_path, tensors, message)
    tensors = random_tensors(SPEC)
    tensors["model.norm.weight"][3] = 1e5
    save_single(tmp_path, tensors)
    load(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: some values are too large"):
        load(tmp_path, dtype=torch.float16)


def check(folder: Path) -> None:
    plan_load(SlotModel(SPEC).weight_slots(), SPEC, folder)


def header_file(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def tensors_file(
    data: bytes = b"", name: str = "x", **tensors: tuple[list[int], list[int]]
) -> bytes:
    """Return a file of F32 tensors by shapes and offsets. `name` replaces "x" in the header."""
    header = {
        key: {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        for key, (shape, offsets) in tensors.items()
    }
    return header_file(json.dumps(header).replace('"x"', f'"{name}"').encode(), data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (0, "truncated or not a safetensors file; it has 0 bytes"),
        (5, "truncated"),
        (100, "truncated"),
        (-1, "truncated or damaged"),
        (b"\xff" * 64, "truncated"),
        (header_file(b"not json"), "header"),
        (header_file(b"[1,2]"), "header"),
        (header_file(b'{"x": 3}'), "header"),
        (header_file(b'{"x": {"dtype": "F32"}}'), "header"),
        (header_file(b"[" * 90_000 + b"]" * 90_000), "header"),
        (header_file(b'{"x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "x": {}}'),
         "x occurs twice"),
        (tensors_file(b"1234", x=([-1], [0, 4])), "header"),
        (tensors_file(b"1234", x=([2], [0, 4])), "cannot have 4 bytes"),
        (tensors_file(b"12345", x=([1], [0, 4])), "truncated or damaged"),
        (tensors_file(b"1234", x=([1], [0, 4]), y=([1], [0, 4])),
         "y begins at byte 0 of the data; expected: 4"),
        (tensors_file(b"12345678", x=([1], [4, 8])), "x begins at byte 4 "),
        (tensors_file(name="x\\u001b[2J", x=([0], [0, 0])),
         r"tensor name is .* printable: 'x.{1,2}x1b\[2J'"),
        (tensors_file(name="x" * 2000, x=([0], [0, 0])), "tensor name is too long .*: 'x{200}'"),
        (tensors_file(x=([2] * 1_000_000, [0, 0])), "x has 1000000 dimensions; at most 64"),
        (tensors_file(x=([2**63, 0], [0, 0])), "invalid shape"),
        (header_file(b'{%s, "0": 0}' % b", ".join(b'"%d": 0' % i for i in range(30_000, -1, -1))),
         "0 occurs twice"),
    ],
)  # fmt: skip
def test_garbage_is_refused_by_path(tmp_path: Path, content: int | bytes, message: str) -> None:
    """Refuse files of `content`; if it is an integer, that many first bytes of a checkpoint."""
    path = save_single(tmp_path, random_tensors(SPEC)) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:content] if isinstance(content, int) else content)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors .*{message}"):
        check(tmp_path)


READERS: dict[str, Callable[[Path], object]] = {
    "quant_model_description.json": compute_identity, "model.safetensors.index.json": read_entries,
    "model-00001.safetensors": read_entries, "rotation.safetensors": read_rotation,
    "chat_template.jinja": ChatTemplate.from_folder, "tokenizer.json": Tokenizer.from_folder,
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_endless_files_refused(tmp_path: Path, name: str, make: Callable[[Path], object]) -> None:
    rotation = {"rotation": "rotation.safetensors"}
    (tmp_path / "config.json").write_text(json.dumps({"negamax_conversion": rotation}))
    make(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
        READERS[name](tmp_path)


def test_folders_without_weights_are_refused_with_their_content(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere is not a folder"):
        check(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no model\.safetensors, .*--load-format synthetic"):
        check(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"it has pytorch_model\.bin \(use a checkpoint in"):
        check(tmp_path)


FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def save_two(folder: Path, *, with_index: bool = True) -> dict[str, str]:
    """Save a checkpoint in two files. Return the file name of each tensor."""
    save_sharded(folder, random_tensors(SPEC), names=FILES)
    index = folder / "model.safetensors.index.json"
    weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
    if not with_index:
        index.unlink()
    return weight_map


HEAD = "lm_head.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: {**m, "ghost": FILES[0]}, "1 tensors are not in the file .*ghost"),
        (lambda m: {**m, HEAD: FILES[m[HEAD] == FILES[0]]}, r"not in the file .*lm_head\.weight"),
        (
            lambda m: {name: file for name, file in m.items() if name != HEAD},
            r"not in model\.safetensors\.index\.json: lm_head\.weight",
        ),
        (
            lambda m: {**m, "x": "model-00003.safetensors"},
            r"of which 1 cannot be found: model-00003\.safetensors .finish",
        ),
        (lambda m: {**m, "x": "../secret.safetensors"}, r"of another folder: '\.\./secret"),
        (lambda m: {**m, "x": "sub/a.safetensors"}, r"'sub/a\.safetensors' \(move all weight"),
        (lambda m: {**m, "x": 3}, "no weight_map"),
        (lambda m: {}, "no weight_map"),
    ],
)
def test_index_and_files_must_agree(
    tmp_path: Path, change: Callable[[dict[str, str]], dict[str, str]], message: str
) -> None:
    write_index(tmp_path, change(save_two(tmp_path)))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_index_may_name_files_with_a_leading_dot(tmp_path: Path) -> None:
    index = save_two(tmp_path)
    write_index(tmp_path, {name: f"./{file}" for name, file in index.items()})
    assert read_entries(tmp_path).keys() == index.keys()
    load(tmp_path)


@pytest.mark.parametrize(
    ("change", "with_index", "message"),
    [
        (
            lambda folder: shutil.copy(folder / FILES[0], folder / FILES[1].replace("2", "3", 1)),
            True, r"omits files of the checkpoint: model-00003-of-00002\.safe",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text("{"),
            True, "cannot be read as JSON",
        ),
        (
            lambda folder: (folder / FILES[1]).unlink(),
            False, r"are missing from .* \(files are missing: there are 1, .*-of-00002",
        ),
        (
            lambda folder: [
                (folder / file).rename(folder / f"{name}.safetensors")
                for file, name in zip(FILES, "ab", strict=True)
            ],
            False, r"it has a\.safetensors, b\.safetensors \(copy the model\.safetensors\.in",
        ),
        (
            lambda folder: shutil.copy(folder / FILES[0], folder / "model-extra.safetensors"),
            False, r"is in two files: model-00001-of-00002.* and model-extra",
        ),
    ],
    ids=["surplus", "broken index", "missing", "other names", "twice"],
)  # fmt: skip
def test_incomplete_and_surplus_files_are_refused(
    tmp_path: Path, change: Callable[[Path], object], with_index: bool, message: str
) -> None:
    save_two(tmp_path, with_index=with_index)
    load(tmp_path)
    change(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        check(tmp_path)


def test_unreadable_files_are_not_reported_as_missing() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        save_single(Path(folder), random_tensors(SPEC))
        weights, config = Path(folder) / "model.safetensors", Path(folder) / "config.json"
        config.write_text("{}")
        (entry, *_) = read_header(weights)
        reads: list[Callable[[], object]] = [
            lambda: read_header(weights),
            lambda: CheckpointReader().read(entry),
            lambda: read_json_object(config),
        ]
        for read in reads:
            read()
        weights.chmod(0)
        config.chmod(0)
        user = os.geteuid()
        os.seteuid(user or 65534)  # The user root may read every file.
        try:
            for read in reads:
                with pytest.raises(CheckpointError) as caught:
                    read()
                assert "cannot be read: Permission denied" in caught.value.message
                assert "chmod" in str(caught.value) and "download" not in str(caught.value)
        finally:
            os.seteuid(user)
