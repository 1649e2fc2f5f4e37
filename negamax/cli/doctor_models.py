"""Find the models that this machine can serve, and the options that each model needs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from negamax.base.errors import ConfigError
from negamax.config.embedded import EMBEDDED
from negamax.config.model_spec import ModelSpec
from negamax.formats.platform import Platform, amd, nvidia
from negamax.formats.readable import is_kept
from negamax.models.memory import as_stored, dequantized, expert_padding, weight_bytes
from negamax.models.registry import bundled_names, bundled_spec, format_hub_id
from negamax.options.engine import EngineOptions
from negamax.options.parallel import ParallelOptions
from negamax.parallel.layout import ParallelLayout
from negamax.parallel.split import possible_splits
from negamax.planner.cost import Model
from negamax.planner.gpus import GIB, MEASURED, MEASURED_RANKS, format_gib
from negamax.planner.topology import LEAST_TOKENS, Fit, fit, gpu_reserve
from negamax.quantization.detect import detect

_EMBEDDED_BYTES = GIB  # main memory that a built-in model needs
_DTYPE = "bfloat16"


@dataclass(frozen=True)
class Gpu:
    """One GPU, with free and total memory in bytes."""

    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]
    amd_arch: str | None = None  # Architecture of an AMD GPU, such as gfx942.

    @property
    def platform(self) -> Platform:
        """The platform that the engine uses for this GPU."""
        if self.amd_arch is not None:
            return amd(self.amd_arch, name=self.name, multiprocessors=0, shared_memory=0)
        return nvidia(self.capability, name=self.name)


@dataclass(frozen=True)
class Machine:
    """Properties of a machine that decide which models run."""

    gpus: tuple[Gpu, ...]
    memory_bytes: int  # Free bytes of main memory.
    cpu_bfloat16: bool  # Whether the CPU has bf16 instructions.
    disk_bytes: int  # Free bytes on the disk to which models are downloaded.


@dataclass(frozen=True)
class ModelVerdict:
    """The result for one model: the command that serves it, or why it cannot run here."""

    model: str
    runs: bool
    command: str
    detail: str


def verdicts(machine: Machine) -> list[ModelVerdict]:
    """Return a verdict for every embedded and every published model."""
    return [verdict(name, machine) for name in (*EMBEDDED, *bundled_names())]


def verdict(name: str, machine: Machine) -> ModelVerdict:
    """Return the verdict for the model `name`, which also states if the download is too large."""
    if name in EMBEDDED:
        return _embedded(name, machine)
    found = _verdict(name, machine)
    size = weight_bytes(bundled_spec(name), dtype=_DTYPE)
    if not found.runs or size < machine.disk_bytes:
        return found
    free = format_gib(machine.disk_bytes)
    download = f"a download needs {format_gib(size)} of disk space, but {free} are free"
    return replace(found, detail=f"{found.detail}; {download}")


def _embedded(name: str, machine: Machine) -> ModelVerdict:
    command, detail = f"negamax serve {name}", "a built-in model, on any machine"
    if machine.memory_bytes < _EMBEDDED_BYTES and not machine.gpus:
        missing = f"needs 1 GiB of main memory, {format_gib(machine.memory_bytes)} are free"
        return ModelVerdict(name, False, "", missing)
    if _refusal(machine.gpus):
        command, detail = f"{command} --device cpu", "a built-in model, on the CPU of this machine"
    return ModelVerdict(name, True, command, detail)


def _verdict(name: str, machine: Machine) -> ModelVerdict:
    model = format_hub_id(name)
    spec = bundled_spec(name)
    if machine.gpus:
        return _on_gpus(model, spec, machine.gpus)
    dtype = _DTYPE if machine.cpu_bfloat16 else "float32"
    needed = weight_bytes(spec, dtype=dtype, kept=dequantized)
    form, free = "bf16" if machine.cpu_bfloat16 else "fp32", format_gib(machine.memory_bytes)
    need = f"{format_gib(needed)} of main memory in {form} on the CPU, {free} free"
    if needed < machine.memory_bytes:
        return ModelVerdict(model, True, f"negamax serve {model}", f"slow: {need}")
    return ModelVerdict(model, False, "", f"needs {need}")


def _on_gpus(model: str, spec: ModelSpec, gpus: Sequence[Gpu]) -> ModelVerdict:
    refusal, kept = _refusal(gpus), _is_kept(spec, gpus)
    if refusal:
        return ModelVerdict(model, False, "", refusal)
    form = as_stored if kept else dequantized
    counted = replace(Model.of(spec, MEASURED), kept=form)

    def fits(splits: ParallelOptions) -> Fit:
        layout, budget = ParallelLayout.of(splits), _budget(gpus, splits)
        return fit(counted, layout, budget=budget, longest=spec.max_position_embeddings)

    tokens, best = 0, ParallelOptions()
    possible = possible_splits(spec, most=len(gpus))
    for splits in sorted(possible, key=lambda each: each.enable_expert_parallel):
        found = fits(splits).tokens
        if found > tokens:
            tokens, best = found, splits
        if tokens >= spec.max_position_embeddings:
            break
    size = best.tensor_parallel_size
    if tokens < LEAST_TOKENS:
        share = EngineOptions.gpu_memory_utilization
        per_gpu = min(int(gpu.total_bytes * share) for gpu in gpus) - gpu_reserve(spec.hidden_size)
        larger = possible_splits(spec, most=64)
        fitting = (each for each in larger if fits(each).weights < per_gpu)
        needed = next((each.tensor_parallel_size for each in fitting), None)
        hint = f"about {needed} free GPUs like these" if needed else "larger GPUs"
        free = format_gib(min(gpu.free_bytes for gpu in gpus))
        need = f"needs {format_gib(fits(ParallelOptions()).weights)} for its weights"
        return ModelVerdict(model, False, "", f"{need}, {free} are free per GPU; it takes {hint}")
    command = f"negamax serve {model}" + (f" --tensor-parallel-size {size}" if size > 1 else "")
    command += " --enable-expert-parallel" if best.enable_expert_parallel else ""
    if fits(best).context_length < spec.max_position_embeddings:
        command += f" --max-model-len {fits(best).context_length // 1024 * 1024}"
    stored = "bf16" if spec.quantization is None else spec.quantization.method.upper()
    held = "as stored" if kept or spec.quantization is None else "dequantized to bf16"
    detail = f"{stored} {held}, {format_gib(fits(best).weights)} of weights per GPU"
    detail += f", KV cache of about {tokens // 1000 * 1000:,} tokens"
    if not all(gpu.platform.is_measured for gpu in gpus[:size]):
        detail += "; never measured on such a GPU"
    elif not all(MEASURED.name in gpu.name for gpu in gpus[:size]):
        detail += f"; measured on {MEASURED.name} only"
    padding = expert_padding(spec, kept=form, layout=ParallelLayout.of(best))
    detail += f"; {padding}" if padding else ""
    if size > MEASURED_RANKS:
        detail += f"; never measured on more than {MEASURED_RANKS} GPUs"
    if best.enable_expert_parallel:
        detail += "; never measured with tensor and expert parallelism together"
    return ModelVerdict(model, True, command, detail)


def _is_kept(spec: ModelSpec, gpus: Sequence[Gpu]) -> bool:
    """Return whether kernels of all `gpus` read a published model's weights without conversion."""
    scheme = detect(spec.quantization)
    return scheme is not None and all(
        is_kept(stored, gpu.platform) for stored in scheme.formats for gpu in gpus
    )


def _refusal(gpus: Sequence[Gpu]) -> str | None:
    """Return why the engine cannot run on one of `gpus`, or None if it runs on all."""
    for gpu in gpus:
        try:
            gpu.platform.check(fp8_cache=False)
        except ConfigError as error:
            return str(error)
    return None


def _budget(gpus: Sequence[Gpu], splits: ParallelOptions) -> int:
    """Return the bytes per GPU that the engine may use."""
    gpus, share = gpus[: splits.tensor_parallel_size], EngineOptions.gpu_memory_utilization
    return min(int(gpu.total_bytes * share) - (gpu.total_bytes - gpu.free_bytes) for gpu in gpus)
