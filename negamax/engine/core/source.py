"""Find the files of a model and its draft model. This module does not import torch."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from negamax.base.errors import ConfigError
from negamax.checkpoint.hub import check_model_name, resolve_model
from negamax.config.embedded import EMBEDDED
from negamax.config.generation import GenerationDefaults, check_override, read_generation_defaults
from negamax.config.json_file import read_json_object
from negamax.config.model_spec import ModelSpec
from negamax.config.quantization import read_quantization
from negamax.models.drafts import DraftFamily, DraftModel, DraftSpec, IsDraft, name_draft_errors
from negamax.models.dspark.config import holds_dspark
from negamax.models.registry import (
    DRAFTS,
    bundled_names,
    bundled_spec,
    find_bundled_draft,
    find_draft_family,
    find_family,
    format_hub_id,
    read_spec,
)
from negamax.options.engine import EngineOptions
from negamax.options.speculation import DSPARK, NGRAM, SpeculationConfig
from negamax.parallel.layout import ParallelLayout
from negamax.parallel.split import check_split
from negamax.quantization import online
from negamax.quantization.detect import detect
from negamax.quantization.names import check_name, quantized

DRAFT_FOLDER = "dspark"  # In a model's folder, the subfolder of the draft model.


@dataclass(frozen=True)
class ModelSource:
    """A model's configuration and folders. A bundled model spec has no weights."""

    spec: ModelSpec
    generation: GenerationDefaults
    weights_folder: Path | None  # None for synthetic weights.
    tokenizer_folder: Path
    name: str  # Default name of the model in the API.
    speculation: SpeculationConfig | None = None
    draft: DraftModel | None = None


def locate(options: EngineOptions) -> ModelSource:
    """Find or download a model, and read its configuration. If `options.model` is a draft, locate
    the target that the draft's config.json names. Raises `ConfigError` or `CheckpointError`.
    """
    try:
        source = _locate_target(options)
    except IsDraft as error:
        if error.verifier is None or options.speculative_config:
            raise
        draft = {"model": options.model, "revision": options.revision}
        options = replace(options, model=error.verifier, revision=None, speculative_config=draft)
        with name_draft_errors(options.speculation.model if options.speculation else None):
            source = _locate_target(options)
    speculation = options.speculation
    if speculation is None or speculation.method == NGRAM:
        return replace(source, speculation=speculation)
    with name_draft_errors(speculation.model or f"of {source.name}"):
        found = _locate_draft(speculation, options, source)
        family = DRAFTS[found.spec.architecture]
        speculation = replace(speculation, method=family.method)
        speculation = speculation.as_long_as(found.spec.speculative_tokens)
        most, asked = found.spec.most_tokens, speculation.num_speculative_tokens
        if most is not None and asked > most:
            raise ConfigError(
                f"num_speculative_tokens is {asked}; the draft proposes at most {most} per step",
                hint=f"use {most} or less",
            )
    if found.spec.verifier is not None:
        note = f"the draft was made for {found.spec.verifier}, but the model is {source.name}"
        speculation = replace(speculation, notes=(*speculation.notes, note))
    return replace(source, speculation=speculation, draft=found)


def check_model(options: EngineOptions) -> None:
    """Check the model's name and options without reading its files. Raises `ConfigError`."""
    check_name(options.quantization)
    check_override(options.override_generation_config or {})
    if not _is_bundled(options.model):
        check_model_name(options.model, bundled_names())
    elif options.load_format != "synthetic":
        raise ConfigError(
            f"{options.model!r} is a bundled model spec without weights",
            hint=f"use {format_hub_id(options.model)}, or add --load-format synthetic",
        )


def check_start(options: EngineOptions) -> None:
    """Check the options as a start does, but download nothing. Raises the errors of `locate`."""
    check_model(options)
    if not _is_bundled(options.model) and check_model_name(options.model) is None:
        return
    spec = _locate_target(options).spec
    if options.script is None:
        choose_context_length(options, spec)
    if options.performance_mode == "balanced":  # Other modes choose parallel sizes later.
        check_split(ParallelLayout.of(options.parallel, nodes=options.nnodes), spec)


def choose_context_length(options: EngineOptions, spec: ModelSpec) -> int:
    """Return --max-model-len or else the model's context length. Raises `ConfigError`."""
    if options.max_model_len is None:
        return spec.max_position_embeddings
    if options.max_model_len > spec.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len is {options.max_model_len}; the model's context length is "
            f"{spec.max_position_embeddings} tokens",
            hint=f"use --max-model-len {spec.max_position_embeddings} or less",
        )
    return options.max_model_len


def _is_bundled(model: str) -> bool:
    return model.lower() in bundled_names() and not Path(model).exists()


def _locate_target(options: EngineOptions) -> ModelSource:
    check_model(options)  # Refuse wrong names before a download.
    if _is_bundled(options.model):
        spec = _keep_layers(bundled_spec(options.model), options.num_hidden_layers)
        spec = _apply_quantization(spec, options)
        folder = EMBEDDED[find_family(spec.architecture).embedded]
        generation = _read_generation(None, spec, options)
        return ModelSource(spec, generation, None, folder, options.model)
    folder = resolve_model(
        options.model,
        options.revision,
        options.download_dir,
        options.source,
        check=partial(_read_spec, options=options),
        needs_weights=options.load_format != "synthetic",
        subfolder=DRAFT_FOLDER if _is_beside(options) else None,
    )
    spec = _read_spec(folder, options=options)
    weights = None if options.load_format == "synthetic" else folder
    generation = _read_generation(folder, spec, options)
    return ModelSource(spec, generation, weights, folder, options.model.rstrip("/"))


def _read_generation(
    folder: Path | None, spec: ModelSpec, options: EngineOptions
) -> GenerationDefaults:
    """Read the model's sampling defaults and EOS ids. Raises `ConfigError` or `CheckpointError`."""
    family = find_family(spec.architecture)
    return read_generation_defaults(
        folder,
        spec,
        absent=family.sampling,
        override=options.override_generation_config,
        turn_end=None if family.chat is None else family.chat.output.turn_close,
    )


def _locate_draft(
    speculation: SpeculationConfig, options: EngineOptions, source: ModelSource
) -> DraftModel:
    """Find or download a draft model for the model of `source`. If the options set no draft model,
    use the draft in the model's folder. Raises `ConfigError` or `CheckpointError`.
    """
    target, is_drawn = source.spec, options.load_format == "synthetic"
    name = _find_beside(source) if _is_beside(options) else speculation.model or ""

    def quantized_as_asked(spec: DraftSpec) -> DraftSpec:
        if speculation.draft_lm_head_quantization is None:
            return spec
        if not spec.own_head or spec.most_tokens is not None:
            raise ConfigError("draft_lm_head_quantization is valid for method eagle3 only")
        if spec.quantization is not None:
            raise ConfigError(
                f"draft_lm_head_quantization is {speculation.draft_lm_head_quantization}; the "
                f"whole draft is quantized by {spec.quantization.method}",
                hint="omit draft_lm_head_quantization",
            )
        return replace(spec, quantization=online.make_head_spec("fp8_per_channel"))

    bundled = find_bundled_draft(name)
    if bundled is not None and not Path(name).exists():
        _check_method(DRAFTS[bundled.architecture], speculation)
        if not is_drawn:
            raise ConfigError(
                "this draft is a bundled spec without weights",
                hint="add --load-format synthetic, or set model to a folder or hub id",
            )
        return DraftModel(
            quantized_as_asked(bundled.adapt_to(target, speculation.aux_layer_ids)), None
        )
    folder = resolve_model(
        name,
        speculation.revision,
        options.download_dir,
        options.source,
        check=partial(_read_draft, speculation=speculation, target=target),
        needs_weights=not is_drawn,
    )
    spec = quantized_as_asked(_read_draft(folder, speculation=speculation, target=target))
    return DraftModel(spec, None if is_drawn else str(folder))


def _is_beside(options: EngineOptions) -> bool:
    """Return whether the draft is in the target model's own folder or repository."""
    speculation = options.speculation
    if speculation is None or speculation.method != DSPARK:
        return False
    return speculation.model in (None, options.model)


def _find_beside(source: ModelSource) -> str:
    """Return the folder of a DSpark draft that is in the target's folder. Raises `ConfigError`."""
    folder = source.tokenizer_folder
    if (folder / DRAFT_FOLDER / "config.json").is_file():
        return str(folder / DRAFT_FOLDER)
    if source.name not in bundled_names() and holds_dspark(
        read_json_object(folder / "config.json")
    ):
        return str(folder)
    raise ConfigError(
        f"{source.name} has no folder {DRAFT_FOLDER}/ with a draft, and its config.json describes "
        "no draft",
        hint='set "model" to the folder or hub id of the draft',
    )


def _read_draft(folder: Path, *, speculation: SpeculationConfig, target: ModelSpec) -> DraftSpec:
    """Read the draft's configuration in `folder`. Raises `ConfigError` or `CheckpointError`."""
    config = read_json_object(folder / "config.json")
    asked = next(one for one in DRAFTS.values() if one.method == speculation.method)
    family = find_draft_family(config) or asked
    _check_method(family, speculation)
    spec = family.read_spec(config)
    assert isinstance(spec, DraftSpec)
    spec = replace(spec, quantization=read_quantization(config, folder))
    detect(spec.quantization)
    return spec.adapt_to(target, speculation.aux_layer_ids)


def _check_method(family: DraftFamily, speculation: SpeculationConfig) -> None:
    """Raise `ConfigError` if the draft model does not support the method that the user has set."""
    if not speculation.is_default_method and family.method != speculation.method:
        raise ConfigError(
            f"method is {speculation.method}, but the draft model is for method {family.method}",
            hint=f"use method {family.method}",
        )


def _read_spec(folder: Path, *, options: EngineOptions) -> ModelSpec:
    """Read the model's spec and apply options. Raises `ConfigError` or `CheckpointError`."""
    spec = _keep_layers(
        read_spec(read_json_object(folder / "config.json"), folder), options.num_hidden_layers
    )
    detect(spec.quantization)  # Refuses unknown formats before weights are downloaded.
    _read_generation(folder, spec, options)  # Refuses invalid files before the download.
    return _apply_quantization(spec, options)


def _apply_quantization(spec: ModelSpec, options: EngineOptions) -> ModelSpec:
    """Apply --quantization to the spec. Raises `ConfigError` if the weights have another format."""
    quantization, note = quantized(
        options.quantization, spec.quantization, is_drawn=options.load_format == "synthetic"
    )
    notes = spec.notes if note is None else (*spec.notes, note)
    return replace(spec, quantization=quantization, notes=notes)


def _keep_layers(spec: ModelSpec, num_layers: int | None) -> ModelSpec:
    """Keep the first `num_layers` layers. Raises `ConfigError` if the model has fewer layers."""
    if num_layers is None:
        return spec
    if num_layers > spec.num_layers:
        raise ConfigError(f"--num-hidden-layers is {num_layers}; allowed: 1 to {spec.num_layers}")
    return spec.first_layers(num_layers)
