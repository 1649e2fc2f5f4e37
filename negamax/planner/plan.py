"""List the topologies that run a model on given GPUs, best first, and the refused topologies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from negamax.base.errors import ConfigError
from negamax.config.model_spec import ModelSpec
from negamax.options.engine import EngineOptions
from negamax.parallel.layout import ParallelLayout
from negamax.planner.chunks import chunks, plan_even_times
from negamax.planner.cost import Costs, Drafts, Model, Workload, tokens_per_second
from negamax.planner.gpus import GIB, GpuModel, format_gib
from negamax.planner.topology import LEAST_TOKENS, LIMITS, Fit, Topology, fit, topologies

TIE = 0.05  # predictions that differ by at most this fraction are considered equal


@dataclass(frozen=True)
class Hardware:
    """`gpus` GPUs of one kind in `nodes` machines."""

    gpu: GpuModel
    gpus: int
    nodes: int = 1
    utilization: float = EngineOptions.gpu_memory_utilization

    @property
    def per_node(self) -> int:
        return self.gpus // self.nodes

    @property
    def budget(self) -> int:
        return int(self.gpu.memory * self.utilization)


@dataclass(frozen=True)
class Prediction:
    """Predicted rates of all replicas of a topology under a workload."""

    concurrency: int  # Number of requests that run at a time; further requests wait for KV blocks.
    token_seconds: float  # Time between two tokens of a request.
    tokens_per_second: float  # Output tokens per second, if prompt chunks run between decode steps.
    draft_tokens: int = 0  # Draft tokens per sequence and step.


@dataclass(frozen=True)
class Candidate:
    """A topology that runs, with its memory and predicted times."""

    topology: Topology
    memory: Fit
    context_length: int  # Largest number of tokens of a request.
    shards_index: bool  # True: each rank holds a shard of the index keys.
    prompt_seconds: float  # Time to first token of a single prompt.
    prefill_rate: float  # Prompt tokens per second of all replicas.
    predictions: tuple[Prediction, ...]  # One entry per workload.
    host_tokens: int = 0  # Tokens whose KV fits in main memory, over all replicas.

    @property
    def most_sequences(self) -> int:
        """Number of sequences per data-parallel rank at the highest requested concurrency."""
        ranks = self.topology.replicas * self.topology.dp
        return -(-self.predictions[-1].concurrency // ranks)

    @property
    def cache_tokens(self) -> int:
        """Number of tokens in the KV caches of all data-parallel ranks of all replicas."""
        return self.memory.tokens * self.topology.dp * self.topology.replicas


@dataclass(frozen=True)
class Refused:
    """A topology that does not run, and the reason."""

    topology: Topology
    reason: str
    missing_bytes: float = 0.0  # bytes of memory that each GPU lacks; 0: memory suffices


@dataclass(frozen=True)
class Plan:
    """The result of `make_plan`. Candidates are sorted by latency at the lowest concurrency."""

    hardware: Hardware
    workloads: tuple[Workload, ...]
    candidates: tuple[Candidate, ...]
    refused: tuple[Refused, ...]

    @cached_property
    def fastest(self) -> Candidate | None:
        """The candidate with the lowest latency at the lowest requested concurrency."""
        return self._plainest_of_best(self._request_seconds)

    @cached_property
    def busiest(self) -> Candidate | None:
        """The candidate with the most tokens per second at the highest requested concurrency."""
        return self._plainest_of_best(lambda each: 1 / each.predictions[-1].tokens_per_second)

    def _plainest_of_best(self, cost: Callable[[Candidate], float]) -> Candidate | None:
        """Of candidates within `TIE` of the least cost, return one with fewest parallel axes."""
        least = min(map(cost, self.candidates), default=0.0)
        alike = [each for each in self.candidates if cost(each) <= (1 + TIE) * least]
        return min(alike, key=lambda each: (each.topology.num_axes, cost(each)), default=None)

    def _request_seconds(self, each: Candidate) -> float:
        output_len = self.workloads[0].output_len
        return each.prompt_seconds + output_len * each.predictions[0].token_seconds


def make_plan(
    spec: ModelSpec,
    hardware: Hardware,
    workloads: Sequence[Workload],
    *,
    kv_dtype: str = "auto",
    index_dtype: str = "auto",
    encoder_tokens: int = EngineOptions.encoder_cache_tokens,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    one_engine: bool = False,
    drafts: Drafts | None = None,
    host_gib: float = 0.0,
    split_for: Sequence[ParallelLayout] = (),
) -> Plan:
    """Plan all topologies of `spec` on `hardware`.

    `workloads` have ascending concurrency. A request of `max_model_len` tokens must fit in the
    cache. If `max_model_len` is None, the longest request of `workloads` must fit, and the context
    length is the largest that fits. `max_num_seqs`: slots of a data-parallel rank (None: one per
    concurrent request, but at least the engine's default). With `one_engine`, only one engine runs,
    and other GPUs stay idle. Index keys are sharded with DCP, or if a request would not fit
    otherwise. `host_gib`: GiB of an engine's main memory for KV blocks. With `host_gib`, index keys
    are not sharded. `split_for`: layouts for which the checkpoint's files are split.

    Raises `ConfigError` if `max_model_len` exceeds the model's context length.
    """
    if max_model_len is not None and max_model_len > spec.max_position_embeddings:
        limit = f"the model's context length is {spec.max_position_embeddings} tokens"
        raise ConfigError(f"--max-model-len is {max_model_len}; {limit}")
    gpu = hardware.gpu
    plain, sharded = (
        Model.of(each, gpu, kv_dtype=kv_dtype, index_dtype=index_dtype)
        for each in (spec, spec.shard_index())
    )
    max_length = spec.max_position_embeddings
    longest = max(workload.tokens for workload in workloads)
    least = max_model_len or min(max(LEAST_TOKENS, longest), max_length)
    candidates, refused = [], []
    heads = spec.num_kv_heads if spec.supports_dcp and not host_gib else None
    for topology in topologies(hardware.gpus, per_node=hardware.per_node, kv_heads=heads):
        topology = replace(topology, replicas=1) if one_engine else topology
        try:
            if split_for and topology.layout not in split_for:
                sizes = f"{split_for[0].tp}, --expert-parallel-size {split_for[0].ep}"
                raise ConfigError(f"the checkpoint is split for --tensor-parallel-size {sizes}")
            topology.check(spec, per_node=hardware.per_node)
            gpu.platform.check(fp8_cache=plain.kv_dtype.startswith("fp8"))
            share = -(-workloads[-1].concurrency // (topology.replicas * topology.dp))
            fitting = partial(
                fit,
                layout=replace(topology.layout, nodes=topology.nodes(per_node=hardware.per_node)),
                budget=hardware.budget,
                longest=max_model_len or max_length,
                max_num_seqs=max_num_seqs or max(LIMITS.max_num_seqs, share),
                encoder_tokens=encoder_tokens,
                drafts=drafts,
            )
            model, memory = _fit(plain, plain if host_gib else sharded, topology, fitting, least)
        except ConfigError as error:
            refused.append(Refused(topology, error.message))
            continue
        missing = least * (memory.token + memory.slots) - memory.room
        if missing > 0:
            reason = _describe_shortage(hardware, memory, least, missing)
            refused.append(Refused(topology, reason, missing))
            continue
        context_length = max_model_len or memory.context_length
        each = _candidate(model, hardware, topology, memory, context_length, workloads, drafts)
        held = int(host_gib * GIB / topology.ranks) // memory.token
        candidates.append(replace(each, host_tokens=held * topology.dp * topology.replicas))
    plan = Plan(hardware, tuple(workloads), tuple(candidates), tuple(refused))
    ordered = sorted(candidates, key=plan._request_seconds)
    return replace(plan, candidates=tuple(ordered))


def _fit(
    plain: Model, sharded: Model, topology: Topology, fitting: Callable[[Model], Fit], least: int
) -> tuple[Model, Fit]:
    """Return the model, with sharded index keys if needed, and its memory on a GPU."""
    model = sharded if topology.dcp > 1 else plain
    memory = fitting(model)
    may_shard = topology.dcp == topology.cp == 1 < topology.tp
    if memory.context_length < least and may_shard:
        found = fitting(sharded)
        if found.context_length >= least:
            return sharded, found
    return model, memory


def _describe_shortage(hardware: Hardware, memory: Fit, num_tokens: int, missing: float) -> str:
    """Describe why a cache of `num_tokens` does not fit: each GPU lacks `missing` bytes."""
    needed = (hardware.gpu.memory * hardware.utilization + missing) / hardware.utilization
    length = memory.context_length
    shorter = f", or with --max-model-len {length}" if length > LEAST_TOKENS else ""
    return (
        f"{format_gib(memory.weights)} of weights, {format_gib(num_tokens * memory.token)} of "
        f"cache for {num_tokens} tokens and {format_gib(num_tokens * memory.slots)} of request "
        f"slots need {format_gib(missing)} more per GPU than --gpu-memory-utilization "
        f"{hardware.utilization:g} allows; the model fits in {format_gib(needed)} per GPU{shorter}"
    )


def _candidate(
    model: Model,
    hardware: Hardware,
    topology: Topology,
    memory: Fit,
    context_length: int,
    workloads: Sequence[Workload],
    drafts: Drafts | None,
) -> Candidate:
    costs = Costs(model, hardware.gpu, topology.layout, per_node=hardware.per_node)
    prompt = workloads[0].input_len
    rate = costs.prefill_rate(prompt, chunk=LIMITS.max_num_batched_tokens)
    predictions = []
    for workload in workloads:
        fitting = memory.tokens * topology.dp // workload.tokens
        own = max(1, min(-(-workload.concurrency // topology.replicas), fitting))
        seconds, count = costs.token_seconds(own, context=workload.context, drafts=drafts)
        running = min(workload.concurrency, own * topology.replicas)
        share = replace(workload, concurrency=own)
        per_replica = tokens_per_second(share, decode_seconds=seconds, prefill_rate=rate)
        predictions.append(Prediction(running, seconds, per_replica * running / own, count))
    seconds, rate = _prompt_seconds(costs, topology, prompt), rate * topology.replicas
    index = model.shards_index
    return Candidate(topology, memory, context_length, index, seconds, rate, tuple(predictions))


def _prompt_seconds(costs: Costs, topology: Topology, num_tokens: int) -> float:
    """Return the time of a single prompt, in the chunks that the engine would use."""
    most = LIMITS.max_num_batched_tokens
    if topology.pp == 1 or num_tokens <= most:
        return costs.prefill_seconds(num_tokens, chunk=most)
    length = plan_even_times(
        costs, max_num_batched_tokens=most, block_size=LIMITS.block_size, max_model_len=num_tokens
    )
    return costs.chunks_seconds(chunks(length, num_tokens, budget=most))
