"""Read a checkpoint's description of its quantization, for the package `quantization`."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from negamax.base.errors import CheckpointError, ConfigError
from negamax.config.json_file import check_regular, read_file, read_json_object

# Files next to config.json in which ModelOpt and ModelSlim describe the quantization.
MODELOPT_FILE, DESCRIPTION = "hf_quant_config.json", "quant_model_description.json"

_OF_MLX = {"bits", "group_size"}  # MLX writes these fields without quant_method.
PROVENANCE = "negamax_conversion"  # Key in config.json under which a conversion is recorded.
# `_ROTATION`: path of keys to the rotation's file name in ModelSlim's description.
_ROTATION = ("optional", "quarot", "rotation_map", "global_rotation")
_INDEX = "model.safetensors.index.json"
_NEURON_EXPERTS = ".expert_mlps.mlp_op."
_NEURON_SCALE = f"{_NEURON_EXPERTS}down_proj.scale"
_LONGEST_HEADER = 100_000_000  # size limit of headers in the safetensors format, in bytes


@dataclass(frozen=True)
class QuantizationSpec:
    """A quantization method and its fields. `source` is the file that contains the fields."""

    method: str
    fields: dict[str, Any]
    source: str = "config.json"


def read_quantization(
    config: Mapping[str, Any], folder: Path | None = None
) -> QuantizationSpec | None:
    """Read the description of the quantization, or return None if no weight is quantized.

    ModelSlim's file in `folder` takes precedence over config.json, because config.json may still
    describe the checkpoint that ModelSlim quantized. ModelOpt's file is read if no other file
    describes a quantization. Raises `ConfigError` or `CheckpointError` for a malformed file.
    """
    found = config.get("quantization_config")
    for given in (found, config.get("quantization")):
        names = given.keys() if isinstance(given, Mapping) else {"quant_method"}
        if "quant_method" not in names and names >= _OF_MLX:
            raise ConfigError(
                "the checkpoint is quantized by MLX, whose layout is not supported",
                hint="use a checkpoint for PyTorch, such as MiniMaxAI/MiniMax-M2.5",
            )
    described = _read_beside(folder, DESCRIPTION, "modelslim")
    if described is not None and any(name.endswith(".weight") for name in described.fields):
        return described
    if found not in (None, {}, []):
        if not isinstance(found, Mapping):
            raise ConfigError(
                f"model config: quantization_config is {found!r}; supported: an object or null"
            )
        if not (method := found.get("quant_method")):
            raise ConfigError(
                f"model config: quantization_config has no quant_method (found: {method!r})",
                hint="add quant_method, or remove quantization_config if no weight is quantized",
            )
        if method == "fp8" and folder is not None and _is_neuron(folder):
            return _make_neuron_spec(found, folder)
        return QuantizationSpec(str(method), dict(found))
    return _read_beside(folder, MODELOPT_FILE, "modelopt") or described


def _read_beside(folder: Path | None, name: str, method: str) -> QuantizationSpec | None:
    if folder is None or not (folder / name).is_file():
        return None
    return QuantizationSpec(method, read_json_object(folder / name), source=name)


def rotation_file(config: Mapping[str, Any], folder: Path) -> str | None:
    """Return the file in `folder` with the residual stream's rotation, or None without a rotation.

    The file's name is in ModelSlim's description, or in the config.json of a converted checkpoint
    (`checkpoint/quarot.py`). Raises the errors of `read_quantization`, and `ConfigError` if the
    file is not a safetensors file inside the folder.
    """
    described = read_quantization(config, folder)
    found: object = described and described.fields
    for name in _ROTATION:
        found = found.get(name) if isinstance(found, Mapping) else None
    if found is None and isinstance(made := config.get(PROVENANCE), Mapping):
        found = made.get("rotation")
    if found is None:
        return None
    path = PurePosixPath(str(found))
    if path.is_absolute() or ".." in path.parts:
        raise ConfigError(f"{folder}: the rotation file {str(path)!r} is outside the folder")
    if path.suffix != ".safetensors" or any(sign in str(path) for sign in "*?["):
        raise ConfigError(
            f"{folder}: the rotation file is {str(path)!r}; it must be one .safetensors file"
        )
    return str(path)


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a checkpoint's pattern of module names.

    Raises `re.error` for a malformed pattern. Also raises `re.error` for a repeated group that
    contains a repeat or an alternative, because matching may take exponential time.
    """
    plain = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "x", pattern)
    plain = re.sub(r"\(\?(?:[:=!]|<[=!]|P<\w+>)", "(", plain)
    groups = [False]  # for each open group, whether it contains repeats or alternatives
    for at, sign in enumerate(plain):
        if sign == "(":
            groups.append(False)
        elif sign == ")" and len(groups) > 1:
            if groups.pop():
                groups[-1] = True
                if plain[at + 1 : at + 2] in ("*", "+", "{"):
                    raise re.error("a repeated group contains repeats or alternatives", pattern)
        elif sign in "*+?{|":
            groups[-1] = True
    return re.compile(pattern)


def _is_neuron(folder: Path) -> bool:
    """Return whether the index lists tensors of Neuron's FP8 experts."""
    try:
        return _NEURON_EXPERTS.encode() in read_file(folder / _INDEX)
    except CheckpointError:
        return False


def _make_neuron_spec(given: Mapping[str, Any], folder: Path) -> QuantizationSpec:
    plain = given.get("modules_to_not_convert") or ()
    fields: dict[str, Any] = {
        "weight_block_size": given.get("weight_block_size"),
        "modules_to_not_convert": [*plain, "o_proj"],
    }
    if _are_rows(folder):
        fields["expert_scales"] = "per_row"
    return QuantizationSpec("neuron_fp8", fields, source=_INDEX)


def _are_rows(folder: Path) -> bool:
    """Return whether scales of Neuron's experts have two dimensions, with a scale per row."""
    try:
        files = json.loads(read_file(folder / _INDEX))["weight_map"]
        name = next((each for each in files if each.endswith(_NEURON_SCALE)), _NEURON_SCALE)
        check_regular(path := folder / PurePosixPath(files[name]).name)
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            shape = json.loads(file.read(min(size, _LONGEST_HEADER)))[name]["shape"]
        return len(shape) == 2
    except (
        OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, CheckpointError
    ):  # fmt: skip
        return False
