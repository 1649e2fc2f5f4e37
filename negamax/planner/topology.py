"""Define topologies (ways to split a model over GPUs) and the conditions that each must meet."""

from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, replace

from negamax.base.errors import ConfigError
from negamax.config.kv_cache import ELEMENT_BYTES, block_bytes, slot_bytes, split_over_holders
from negamax.config.model_spec import ModelSpec
from negamax.models.memory import draft_bytes
from negamax.options.engine import STEP_LIMITS, EngineOptions
from negamax.options.flags import flag_name
from negamax.options.parallel import ParallelOptions
from negamax.parallel.layout import ParallelLayout
from negamax.parallel.split import check_split
from negamax.planner.cost import Drafts, Model
from negamax.planner.gpus import GIB

LIMITS = STEP_LIMITS["cuda"]  # Default step limits of each data-parallel rank.
LEAST_TOKENS = 8192  # Smallest KV cache of a usable model, in tokens.


def gpu_reserve(hidden_size: int) -> int:
    """Return the bytes to reserve on each GPU for a step's workspace, CUDA graphs and the driver.

    The engine measured these bytes on an H200 with default step sizes: 5.8 to 6.8 GiB for
    MiniMax-M2 (hidden size 3072), and 8.8 to 9.8 GiB for MiniMax-M3 (6144). The result adds a small
    margin. The workspace of a step also covers the 0.7 GiB that M3 needs to encode images.
    """
    return (46 * GIB + 27 * GIB * hidden_size // 3072) // 10


@dataclass(frozen=True)
class Topology:
    """Number of engines, and number of ranks per axis of one engine (`parallel/layout.py`)."""

    tp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    cp: int = 1
    replicas: int = 1
    dcp: int = 1

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def gpus(self) -> int:
        return self.ranks * self.replicas

    @property
    def num_axes(self) -> int:
        return sum(size > 1 for size in astuple(self))

    @property
    def label(self) -> str:
        """Return a name such as "PP2 TP2 EP2" or "2 x TP4"."""
        names = ("PP", "DP", "PCP", "TP", "DCP", "EP")
        named = zip(names, (self.pp, self.dp, self.cp, self.tp, self.dcp, self.ep), strict=True)
        words = [f"{name}{size}" for name, size in named if size > 1] or ["TP1"]
        return (f"{self.replicas} x " if self.replicas > 1 else "") + " ".join(words)

    @property
    def layout(self) -> ParallelLayout:
        """Return the parallel layout of rank 0. Raises `ConfigError` for invalid sizes."""
        return ParallelLayout(
            tp=self.tp, ep=self.ep, dp=self.dp, pp=self.pp, cp=self.cp, dcp=self.dcp
        )

    @property
    def sizes(self) -> Mapping[str, int | bool]:
        """Return the fields of `ParallelOptions` that differ from their defaults."""
        stage = self.dp * self.cp * self.tp
        given: dict[str, int | bool] = {
            "tensor_parallel_size": self.tp,
            "data_parallel_size": self.dp,
            "pipeline_parallel_size": self.pp,
            "prefill_context_parallel_size": self.cp,
            "decode_context_parallel_size": self.dcp,
        }
        found = {name: size for name, size in given.items() if size > 1}
        if self.ep == stage > 1:
            return {**found, "enable_expert_parallel": True}
        return found if self.ep == 1 else {**found, "expert_parallel_size": self.ep}

    @property
    def options(self) -> ParallelOptions:
        """Return the options that start one engine, or raise `ConfigError`."""
        options = ParallelOptions(**self.sizes)  # type: ignore[arg-type]
        if ParallelLayout.of(options) != self.layout:
            raise ConfigError(f"no options of Negamax start {replace(self, replicas=1).label}")
        return options

    @property
    def flags(self) -> list[str]:
        return [
            word
            for name, size in self.sizes.items()
            for word in (flag_name(name), *(() if size is True else (str(size),)))
        ]

    def nodes(self, *, per_node: int) -> int:
        """Return the number of machines of one engine, with `per_node` GPUs each."""
        return max(1, self.ranks // per_node)

    def check(self, spec: ModelSpec, *, per_node: int) -> None:
        """Raise `ConfigError` if machines with `per_node` GPUs cannot run this topology."""
        if self.ranks > per_node and per_node % self.tp:
            raise ConfigError(
                f"a machine has {per_node} of these GPUs, and networks are too slow for the "
                f"exchanges of {self.tp} tensor-parallel ranks"
            )
        check_split(self.layout, spec)
        _ = self.options


def topologies(gpus: int, *, per_node: int, kv_heads: int | None = None) -> Iterator[Topology]:
    """Yield all topologies for up to `gpus` GPUs, each with as many replicas as fit.

    An engine uses GPUs of one machine or several whole machines. Pass `kv_heads` to allow DCP.
    """
    for ranks in (*range(1, per_node + 1), *range(2 * per_node, gpus + 1, per_node)):
        replicas = per_node // ranks * (gpus // per_node) or gpus // ranks
        for pp in _divisors(ranks):
            for dp in _divisors(ranks // pp):
                for cp in _divisors(ranks // pp // dp):
                    tp = ranks // pp // dp // cp
                    copies = 1 if kv_heads is None or cp > 1 or tp % kv_heads else tp // kv_heads
                    for ep in _divisors(ranks // pp):
                        for dcp in _divisors(copies):
                            yield Topology(tp, ep, dp, pp, cp, replicas, dcp)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


@dataclass(frozen=True)
class Fit:
    """Memory use in bytes of a GPU in the pipeline stage with the least room for KV cache."""

    weights: int
    room: int  # Bytes left for KV cache and request slots; negative if memory is missing.
    token: int  # KV cache bytes per token.
    slots: int  # Bytes that all request slots need per token of context length.
    longest: int  # Requested context length in tokens.

    @property
    def context_length(self) -> int:
        return min(self.longest, max(0, self.room) // (self.token + self.slots))

    @property
    def tokens(self) -> int:
        """Number of tokens that the KV cache of one data-parallel rank can hold."""
        return max(0, self.room - self.context_length * self.slots) // self.token


def fit(
    model: Model,
    layout: ParallelLayout,
    *,
    budget: int,
    longest: int,
    max_num_seqs: int = LIMITS.max_num_seqs,
    encoder_tokens: int = EngineOptions.encoder_cache_tokens,
    drafts: Drafts | None = None,
) -> Fit:
    """Return the use of a GPU's `budget` bytes, with slots for requests of `longest` tokens. If the
    engine reads images, the use includes a vision tower and `encoder_tokens` image embeddings.
    """
    spec = model.weights.spec
    width = spec.vision.text_hidden if spec.vision and encoder_tokens else 0
    slots = slot_bytes(longest, LIMITS.block_size, item=4) * (max_num_seqs + 1)
    found = []
    for stage in map(layout.replace_rank, range(0, layout.world_size, layout.stage_size)):
        held = model.on_rank(stage)
        weights = round(sum(size for kind, _, size in held if width or not kind.weight.is_vision))
        layers = stage.layers(spec.num_layers)
        caches = split_over_holders(model.caches[layers.start : layers.stop], layout.dcp)
        token = block_bytes(caches, 1, dtype=model.kv_dtype, ranks=layout.tp)
        room = budget - gpu_reserve(spec.hidden_size)
        room -= stage.is_first_stage * encoder_tokens * width * ELEMENT_BYTES[model.dtype]
        if drafts is not None and drafts.spec is not None and stage.is_last_stage:
            draft, tp = drafts.spec, layout.tp
            check_split(replace(layout.within_stage, dcp=1), draft)
            token += block_bytes(draft.kv_caches(), 1, dtype=model.kv_dtype, ranks=tp)
            weights += draft_bytes(
                draft, dtype=model.dtype, kept=model.kept, ranks=tp, embeds=stage.is_first_stage
            )
            # memory for the logits and the input (a chunk's residual streams) of the draft model
            logits = max_num_seqs * drafts.speculation.num_speculative_tokens * draft.vocab_size
            streams = len(draft.aux_layers) * LIMITS.max_num_batched_tokens
            room -= 4 * logits // tp + 2 * streams * draft.target_hidden_size
        room -= weights
        found.append(Fit(weights, room, token, -(-slots // longest), longest))
    return min(found, key=lambda each: each.tokens or each.room)
