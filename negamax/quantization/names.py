"""The names of vLLM 0.33 and SGLang 0.5.23 for `--quantization`, checked against the checkpoint."""

from collections.abc import Mapping

from negamax.base.errors import ConfigError
from negamax.config.quantization import QuantizationSpec
from negamax.quantization import online
from negamax.quantization.detect import detect

# Method -> other names for it -> the algorithm that the name is limited to ("": none). Some names
# select kernels in other engines; here the platform selects them.
_NAMES: Mapping[str, Mapping[str, str]] = {
    "auto-round": {"inc": ""},
    "awq": dict.fromkeys(("auto_awq", "awq_marlin", "cpu_awq", "marlin", "moe_wna16"), ""),
    "compressed-tensors": {"w8a8_fp8": "float-quantized", "w8a8_int8": "int-quantized"},
    "fp8": {},
    "gptq": dict.fromkeys(("auto_gptq", "gptq_marlin", "marlin", "moe_wna16"), ""),
    "modelopt": {
        "modelopt_fp4": "NVFP4", "modelopt_fp8": "FP8", "modelopt_mixed": "MIXED_PRECISION",
        "modelopt_mxfp8": "MXFP8", "mxfp8": "MXFP8", "petit_nvfp4": "NVFP4",
    },
    "modelslim": {"ascend": ""},
    "mxfp4": {},
    "mxfp8": {"modelopt_mxfp8": ""},
    "neuron_fp8": {},
    "quark": {},
}  # fmt: skip


_BLOCKS = ("fp8", "fp8-per-block")  # also for MXFP8 checkpoints


def check_name(name: str | None) -> str | None:
    """Return the normalized `name`; None: the checkpoint decides. Errors: `ConfigError`."""
    plain = _plain(name or "")
    if plain in ("", "auto", "none"):
        return None
    known = {*_NAMES, *online.NAMES, *(alias for names in _NAMES.values() for alias in names)}
    if plain not in map(_plain, known):
        raise ConfigError(
            f"--quantization is {name!r}; allowed: {', '.join(sorted(known))}",
            hint="leave it out: the format of a checkpoint is found in its files",
        )
    return plain


def quantized(
    name: str | None, spec: QuantizationSpec | None, *, is_drawn: bool = False
) -> tuple[QuantizationSpec | None, str | None]:
    """Return how `--quantization NAME` holds the weights that `spec` describes, and a log line.

    Synthetic weights (`is_drawn`) are held in any format. Errors: `ConfigError` if the checkpoint
    has another format.
    """
    wanted = check_name(name)
    if wanted is None:
        return spec, None
    if spec is None and wanted in map(_plain, online.NAMES):
        return online.spec(wanted), None
    if spec is None:
        raise ConfigError(
            f"--quantization is {name!r}; the checkpoint is not quantized",
            hint=f"leave it out, or have its weights quantized while they are read: "
            f"{', '.join(online.NAMES)}",
        )
    if wanted not in (_plain(spec.method), *map(_plain, _names(spec))):
        if is_drawn:
            return quantized(name, None)
        if wanted in _BLOCKS and _can_be_blocks(spec):
            return online.make_blocks_spec(spec), None
        raise ConfigError(
            f"--quantization is {name!r}; the checkpoint is quantized by {spec.method!r} "
            f"({spec.source})",
            hint="leave it out",
        )
    return spec, f"--quantization {name}: detected in {spec.source}, not needed"


def _can_be_blocks(spec: QuantizationSpec) -> bool:
    try:
        scheme = detect(spec)
    except ConfigError:  # the loader reports it
        return False
    return scheme is not None and online.has_mxfp8(scheme)


def _names(spec: QuantizationSpec) -> list[str]:
    """Return the names of a checkpoint's quantization beside its method."""
    method = _plain(spec.method)
    # some methods include the algorithm
    method = "modelopt" if method.startswith("modelopt") else method
    fields = spec.fields.get("quantization")  # of hf_quant_config.json
    fields = fields if isinstance(fields, Mapping) else spec.fields
    kinds = ("", fields.get("format"), fields.get("quant_algo"))
    return [method, *(name for name, kind in _NAMES.get(method, {}).items() if kind in kinds)]


def _plain(name: str) -> str:
    """Normalize spellings such as `auto_round`, `auto-round` and `AUTO-ROUND`."""
    return name.lower().replace("_", "-")
