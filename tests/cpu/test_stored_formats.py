import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from m2_checkpoints import TINY, random_tensors, save_sharded, tiny_spec
from model_support import build
from quantized_writers import LEFT_OUT, WRITERS, is_matrix, write
from safetensors.torch import load_file, save_file
from stored_kernels import keeping_stored
from stored_support import assert_holds, greedy, load

from negamax.base.errors import CheckpointError
from negamax.convert.convert import Conversion, convert
from negamax.formats.platform import CPU
from negamax.kernels.registry import KernelTable, resolve
from negamax.parallel.layout import ParallelLayout

CONFIG: dict[str, Any] = {
    **TINY, "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2",
    "dtype": "float32", "hidden_size": 64, "intermediate_size": 64,
}  # fmt: skip
TENSORS = random_tensors(tiny_spec(**CONFIG))
KEEPING = keeping_stored(resolve(platform=CPU, dtype=torch.float32))
PROMPT = [5, 17, 60, 3]
DEQ_SCALES = ("modelslim-static", "modelslim-static-fp16")
# The two inner ones of four ranks.
LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(rank=1, tp=2, ep=2),
    ParallelLayout(rank=1, tp=4, ep=2),
    ParallelLayout(rank=2, tp=4, ep=2),
]


@pytest.mark.parametrize("name", WRITERS)
def test_a_model_computes_with_the_matrices_that_were_stored(name: str, tmp_path: Path) -> None:
    plain = write(tmp_path, CONFIG, TENSORS, WRITERS[name])
    head = {"lm_head.weight"} if WRITERS[name].with_head else set()
    quantized = {key for key in plain if is_matrix(key) and not key.startswith(LEFT_OUT)} | head
    for key in quantized:  # the stored values differ from the originals
        error = (plain[key] - TENSORS[key]).norm() / TENSORS[key].norm()
        assert 0 < error < 0.5, key
    for layout in LAYOUTS:
        model, found, report = load(tmp_path, layout)
        assert report.num_dequantized == len(quantized & found.keys()) > 0
        assert_holds(model, found, plain)
        if layout.tp == 1:
            model.finish_loading()
            text = greedy(model, PROMPT, 12)
            assert len(set(text)) > 3
            assert text == greedy(build(tiny_spec(**CONFIG), plain), PROMPT, 12)
            if name == "fp8-fnuz-dtype":  # its config.json declares OCP FP8
                continue
            kept, _, report = load(tmp_path, layout, kernels=KEEPING)
            not_kept = "act-order" in name or name in DEQ_SCALES
            assert (report.num_kept == 0) is not_kept
            # An expert's matrices have scale_bias of different shapes, so they are not kept.
            assert report.num_dequantized == 0 or name != "modelslim-int4"
            kept.finish_loading()
            assert greedy(kept, PROMPT, 12) == text


@pytest.mark.parametrize("with_index", [True, False])
def test_modelslim_file_names_are_found(tmp_path: Path, with_index: bool) -> None:
    plain = write(tmp_path, CONFIG, TENSORS, WRITERS["modelslim-dynamic"])
    stored = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    files = [f"quant_model_weights-0000{number}-of-00002.safetensors" for number in (1, 2)]
    save_sharded(tmp_path, stored, names=files, with_index=with_index)
    if with_index:
        index = tmp_path / "model.safetensors.index.json"
        index.rename(tmp_path / "quant_model_weights.safetensors.index.json")
    _, found, _ = load(tmp_path, ParallelLayout())
    name = "model.layers.0.block_sparse_moe.experts.3.w2.weight"
    assert torch.equal(found[name], plain[name])


def test_bf16_layer_described_as_fp4_loads_or_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = write(tmp_path, CONFIG, TENSORS, WRITERS["modelopt-nvfp4"])
    stored, file = load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors"
    module, layout = "model.layers.0.self_attn.q_proj", ParallelLayout()
    stored[f"{module}.weight"] = plain[f"{module}.weight"].bfloat16()
    save_file(stored, file)
    with pytest.raises(CheckpointError, match=rf"{module}.weight has dtype BF16; nvfp4 is stored"):
        load(tmp_path, layout)
    for name in ("weight_scale", "weight_scale_2", "input_scale"):
        del stored[f"{module}.{name}"]
    save_file(stored, file)
    with caplog.at_level(logging.INFO, logger="negamax"):
        _, found, _ = load(tmp_path, layout)
    assert "30 activation scales are not used" in caplog.text
    assert torch.equal(found[f"{module}.weight"], stored[f"{module}.weight"].float())
    stored[f"{module}.weight"] = stored[f"{module}.weight"].view(torch.uint8)
    save_file(stored, file)
    with pytest.raises(CheckpointError, match=rf"{module}.weight .*nvfp4.*missing|shape"):
        load(tmp_path, layout)


def test_rank_keeps_experts_if_another_rank_has_one_in_bf16(tmp_path: Path) -> None:
    plain = write(tmp_path, CONFIG, TENSORS, WRITERS["modelopt-nvfp4"])
    expert, file = "model.layers.0.block_sparse_moe.experts.0", tmp_path / "model.safetensors"
    stored = {k: t for k, t in load_file(file).items() if not k.startswith(f"{expert}.")}
    own = {key: plain[key].bfloat16() for key in plain if key.startswith(f"{expert}.")}
    save_file({**stored, **own}, file)
    path = tmp_path / "hf_quant_config.json"
    described = json.loads(path.read_text())
    described["quantization"]["exclude_modules"].append(f"{expert}*")
    path.write_text(json.dumps(described))
    kept = []
    for rank in range(2):
        layout = ParallelLayout(rank=rank, tp=2, ep=2)
        model, found, report = load(tmp_path, layout, kernels=KEEPING)
        name = f"{expert}.w1.weight"
        assert model.weight_slots()[name].needed is (rank == 0)
        if rank == 0:
            assert torch.equal(found[name], own[name].float())
        kept.append(report.num_kept)
    # Rank 0 dequantizes one of the two layers; each layer has two experts.
    assert kept[1] - kept[0] == 2 * 3


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("packed-int4", "weight_shape", r"weight_shape is \[65, 65\]; the shape of 64 x 64 is"),
        ("gptq-sym", "g_idx", r"g_idx is \[1, 1, .*; the permutation of 64 x 64 is \[0, 0, "),
        ("gptq-act-order", "g_idx", r"g_idx has entries from .* to 2; of 64 x 64 .* 0 to 1"),
        ("packed-int4-act-order", "weight_g_idx", "weight_g_idx has entries from .* to 2;"),
        ("modelslim-dynamic", "weight_offset", r"weight_offset is \[1.0, .* is \[0.0, 0.0, "),
    ],
)
@pytest.mark.parametrize("kernels", [None, KEEPING], ids=["dequantised", "kept"])
def test_tensors_with_known_content_are_checked(
    tmp_path: Path, name: str, part: str, message: str, kernels: KernelTable | None
) -> None:
    write(tmp_path, CONFIG, TENSORS, WRITERS[name])
    stored = load_file(tmp_path / "model.safetensors")
    changed = stored[f"model.layers.0.block_sparse_moe.experts.1.w3.{part}"]
    changed[changed == changed.max()] += 1
    if name == "gptq-sym":
        changed[:] = 1
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"experts\.1\.w3\.{message}"):
        load(tmp_path, ParallelLayout(), kernels=kernels)


def test_fnuz_nan_is_named(tmp_path: Path) -> None:
    write(tmp_path, CONFIG, TENSORS, WRITERS["fp8-fnuz"])
    stored, file = load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors"
    name = "model.layers.0.self_attn.q_proj.weight"
    stored[name].view(torch.uint8)[3, 5] = 0x80
    save_file(stored, file)
    with pytest.raises(CheckpointError, match=rf"{name} in 1 of 64 x 64 .*first at \[3, 5\]"):
        load(tmp_path, ParallelLayout())


@pytest.mark.parametrize(
    "name",
    ["gptq-act-order", "packed-int4-asym", "quark-int8-static", "modelslim-mix", "modelopt-nvfp4"],
)
def test_a_checkpoint_that_is_split_keeps_its_format(name: str, tmp_path: Path) -> None:
    source, split = tmp_path / "source", tmp_path / "split"
    source.mkdir()
    plain = write(source, CONFIG, TENSORS, WRITERS[name])
    convert(Conversion(str(source), source, split, None, tp=2))
    for rank in range(2):
        model, found, report = load(split, ParallelLayout(rank=rank, tp=2), is_split=True)
        assert report.num_dequantized > 20
        assert_holds(model, found, plain)
