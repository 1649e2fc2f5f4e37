"""The names of vLLM 0.33 and SGLang 0.5.23 for `--quantization`, checked against the checkpoint."""

from collections.abc import Mapping

from negamax.base.errors import ConfigError
from negamax.config.quantization import QuantizationSpec
from negamax.config.spellings import METHODS, find_method, plain
from negamax.quantization import online
from negamax.quantization.detect import detect

# also for other checkpoints with MXFP8 matrices
_BLOCKS, _AS_STORED = ("fp8", "fp8-per-block"), "mxfp8"


def check_name(name: str | None) -> str | None:
    """Return the normalized `name`; None: the checkpoint decides. Errors: `ConfigError`."""
    spelled = plain(name or "")
    if spelled in ("", "auto", "none"):
        return None
    known = {*METHODS, *online.NAMES, *(alias for names in METHODS.values() for alias in names)}
    if spelled not in map(plain, known):
        raise ConfigError(
            f"--quantization is {name!r}; allowed: {', '.join(sorted(known))}",
            hint="leave it out: the format of a checkpoint is found in its files",
        )
    return spelled


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
    if spec is None and wanted in map(plain, online.NAMES):
        return online.spec(wanted), None
    if spec is None:
        raise ConfigError(
            f"--quantization is {name!r}; the checkpoint is not quantized",
            hint=f"leave it out, or have its weights quantized while they are read: "
            f"{', '.join(online.NAMES)}",
        )
    if wanted not in (plain(spec.method), *map(plain, _names(spec))):
        if wanted in (*_BLOCKS, _AS_STORED) and (blocks := find_blocks_spec(spec)):
            return spec if wanted == _AS_STORED else blocks, None
        if is_drawn:
            return quantized(name, None)
        raise ConfigError(
            f"--quantization is {name!r}; the checkpoint is quantized by {spec.method!r} "
            f"({spec.source})",
            hint="leave it out",
        )
    return spec, f"--quantization {name}: detected in {spec.source}, not needed"


def find_blocks_spec(spec: QuantizationSpec) -> QuantizationSpec | None:
    """Return how MXFP8 matrices of a checkpoint are held as FP8 blocks; None: it has none."""
    try:
        scheme = detect(spec)
    except ConfigError:  # the loader reports it
        return None
    return online.make_blocks_spec(spec) if scheme and online.has_mxfp8(scheme) else None


def _names(spec: QuantizationSpec) -> list[str]:
    """Return the names of a checkpoint's quantization beside its method."""
    method = find_method(spec.method)
    fields = spec.fields.get("quantization")  # of hf_quant_config.json
    fields = fields if isinstance(fields, Mapping) else spec.fields
    kinds = ("", fields.get("format"), fields.get("quant_algo"))
    return [method, *(name for name, kind in METHODS.get(method, {}).items() if kind in kinds)]
