"""Collect facts that must be equal on all nodes. Node 0 compares the facts before weights load."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

import msgspec

import negamax
from negamax.base import env
from negamax.config.json_file import read_file
from negamax.engine.core.source import ModelSource
from negamax.options.engine import EngineOptions

# Names of options that may differ between nodes.
_OWN = {
    "model", "revision", "source", "download_dir", "weight_cache", "speculative_config", "device",
    "num_threads", "node_rank", "interface", "master_addr", "max_queued_requests",
    "max_queued_tokens", "max_logprobs", "enable_prefix_caching", "enable_overlap", "log_level",
    "log_format", "show_progress", "crash_dump_dir",
    "kv_offloading_path",
    "init_expert_location",  # Only node 0 reads this option.
}  # fmt: skip
_PACKAGES = ("torch", "triton", "msgspec", "pyzmq")


def collect_facts(options: EngineOptions, source: ModelSource, *, device: str) -> dict[str, str]:
    """Collect package versions, shared options, and digests of the code, model and tensors."""
    facts = {"Negamax": negamax.__version__, "code": env.digest_code(), "device": device}
    facts |= {name: env.installed_version(name) or "none" for name in _PACKAGES}
    draft = source.draft
    facts["the model's configuration"] = _digest((source.spec, source.generation))
    facts["the draft's configuration"] = _digest(draft.spec if draft else None)
    speculation = asdict(source.speculation) if source.speculation else {}
    facts["--speculative-config"] = _digest(speculation | {"model": None})
    facts["the tensors of the checkpoint"] = _tensors_digest(source.weights_folder)
    facts["files of KV blocks"] = "none" if options.file_folder is None else "kept"
    for field in fields(options):
        if field.name not in _OWN:
            facts[f"--{field.name.replace('_', '-')}"] = str(getattr(options, field.name))
    return facts


def digest_model(source: ModelSource, caches: tuple[object, ...]) -> str:
    """Return a digest of the model. Only engines with equal digests can exchange KV blocks."""
    draft = source.draft
    folder = None if draft is None or draft.folder is None else Path(draft.folder)
    tensors = (_tensors_digest(source.weights_folder), _tensors_digest(folder))
    specs = (source.spec, draft.spec if draft else None)
    return _digest((negamax.__version__, specs, tensors, caches))


def find_differences(own: dict[str, str], others: dict[str, str], *, name: str) -> Iterator[str]:
    """Describe each difference between facts of node 0 (`own`) and of node `name` (`others`)."""
    for fact in dict.fromkeys([*own, *others]):
        here, there = own.get(fact, "unknown"), others.get(fact, "unknown")
        if here != there:
            yield f"{fact}: {here[:60]} on node 0, {there[:60]} on {name}"


def _digest(value: object) -> str:
    data = msgspec.json.encode(value, enc_hook=repr, order="deterministic")
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _tensors_digest(folder: Path | None) -> str:
    if folder is None:
        return "synthetic"
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return hashlib.blake2b(read_file(index), digest_size=8).hexdigest()
    single = folder / "model.safetensors"
    return f"{single.stat().st_size} bytes" if single.exists() else "several files without an index"
