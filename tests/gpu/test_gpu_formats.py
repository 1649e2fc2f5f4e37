import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_gpu_engine import agreement, answers

from negamax.config.embedded import EMBEDDED
from negamax.convert.source import Source
from tests.tiny import TOKENIZER_FILES

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
from stored_formats import FORMATS, write

# The list has one format per layout that kernels distinguish. Some methods round activations.
WEIGHTS_ONLY = (
    "awq", "compressed-mxfp4", "compressed-nvfp4", "gptq-act-order", "gptq-asym", "gptq-v2",
    "modelopt-mixed", "modelopt-nvfp4", "mxfp8", "packed-int4", "packed-int4-asym", "packed-int8",
    "quark-mxfp4",
)  # fmt: skip
ROUNDED = ("compressed-fp8-channel", "int8", "modelopt-fp8", "modelslim-dynamic", "quark-int8")
MXFP8 = ("modelopt-mixed", "mxfp8")  # FP8 blocks on a GPU unless an option differs
DEGREES = (1, 2, 4)
_TEXTS = (*TOKENIZER_FILES, "generation_config.json")


def both_ways(folder: Path, name: str) -> tuple[Path, Path]:
    source = Source(EMBEDDED["nano"])
    with source.reader() as reader:
        tensors = {one.name: one.dequantize(one.read(reader)) for one in source.weights}
    config = {**source.config, "dtype": "bfloat16"}
    del config["quantization_config"]
    stored, plain = folder / "stored", folder / "plain"
    for one in (stored, plain):
        one.mkdir()
        for text in _TEXTS:
            shutil.copy(EMBEDDED["nano"] / text, one / text)
    values = write(stored, config, tensors, FORMATS[name])
    save_file({key: one.contiguous() for key, one in values.items()}, plain / "model.safetensors")
    (plain / "config.json").write_text(json.dumps(config))
    return stored, plain


@pytest.mark.parametrize("ranks", DEGREES)
@pytest.mark.parametrize(
    "name", (*WEIGHTS_ONLY, *ROUNDED, *(f"{each} as blocks" for each in MXFP8))
)
def test_answers_as_in_bf16(name: str, ranks: int, tmp_path: Path, device: str = "cuda") -> None:
    if device == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    name, _, blocks = name.partition(" as ")
    stored, plain = both_ways(tmp_path, name)
    options = {"device": device, "enforce_eager": True, "max_num_batched_tokens": 2048}
    held = {"quantization": "mxfp8"} if name in MXFP8 and not blocks else {}
    share = agreement(
        answers(str(plain), **options),
        answers(str(stored), tensor_parallel_size=ranks, **held, **options),
    )
    print(f"agreement of {name} on {ranks} ranks with its values in bf16: {share:.4f}")
    assert share >= (0.95 if blocks or name in ROUNDED else 0.97)
