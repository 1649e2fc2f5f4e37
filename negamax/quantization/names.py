"""Check `--quantization` against the checkpoint. Names are from vLLM 0.33 and SGLang 0.5.23."""

from collections.abc import Mapping

from negamax.base.errors import ConfigError
from negamax.config.quantization import QuantizationSpec
from negamax.config.spellings import METHODS, find_method, plain
from negamax.quantization import online
from negamax.quantization.detect import detect

# With these values of --quantization, MXFP8 matrices are loaded as FP8 blocks or as stored.
_BLOCKS, _AS_STORED = ("fp8", "fp8-per-block"), "mxfp8"


def check_name(name: str | None) -> str | None:
    """Return the normalized `name`; None selects automatic detection. Raises `ConfigError`."""
    spelled = plain(name or "")
    if spelled in ("", "auto", "none"):
        return None
    known = {*METHODS, *online.NAMES, *(alias for names in METHODS.values() for alias in names)}
    if spelled not in map(plain, known):
        raise ConfigError(
            f"--quantization is {name!r}; allowed: {', '.join(sorted(known))}",
            hint="omit the option: Negamax detects the format from the checkpoint",
        )
    return spelled


def quantized(
    name: str | None, spec: QuantizationSpec | None, *, is_drawn: bool = False
) -> tuple[QuantizationSpec | None, str | None]:
    """Return the description of the loaded weights, and a log line or None.

    `name` is the value of --quantization, and `spec` describes the checkpoint. Synthetic weights
    (`is_drawn`) can have any format. Raises `ConfigError` if the checkpoint has another format.
    """
    wanted = check_name(name)
    if wanted is None:
        return spec, None
    if spec is None and wanted in map(plain, online.NAMES):
        return online.spec(wanted), None
    if spec is None:
        raise ConfigError(
            f"--quantization is {name!r}; the checkpoint is not quantized",
            hint=f"omit the option, or quantize weights while they are read, with one of: "
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
            hint="omit --quantization",
        )
    return spec, f"--quantization {name} is not needed: the format was detected in {spec.source}"


def find_blocks_spec(spec: QuantizationSpec) -> QuantizationSpec | None:
    """Return the description for loading MXFP8 matrices as FP8 blocks, or None if none exist."""
    try:
        scheme = detect(spec)
    except ConfigError:  # skip: the loader will report this error
        return None
    return online.make_blocks_spec(spec) if scheme and online.has_mxfp8(scheme) else None


def _names(spec: QuantizationSpec) -> list[str]:
    """List --quantization values that fit the checkpoint: its method, then names of its format."""
    method = find_method(spec.method)
    fields = spec.fields.get("quantization")  # nested in hf_quant_config.json only
    fields = fields if isinstance(fields, Mapping) else spec.fields
    kinds = ("", fields.get("format"), fields.get("quant_algo"))
    return [method, *(name for name, kind in METHODS.get(method, {}).items() if kind in kinds)]
