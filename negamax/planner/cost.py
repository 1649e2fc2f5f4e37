"""Predict the seconds of a step from the bytes, operations and exchanges of a rank.

    stage = max(bytes of its GEMMs / bandwidth, their operations / rate)
          + bytes of its KV cache / bandwidth (prefill: operations of attention / rate)
          + layers * (LAYER_SECONDS + ROW_SECONDS * sqrt(rows) + TOKEN_SECONDS * tokens / tp)
          + exchanges

All constants were measured on an H200 (docs/performance.md, docs/results). The prediction assumes
that other GPUs reach the same fractions of vendor figures as an H200. LAYER_SECONDS and ROW_SECONDS
are fitted to times per token on one, two and four GPUs, and TOKEN_SECONDS to prompt times. The
other constants were measured one by one. docs/parallelism.md states the prediction error.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, sqrt
from statistics import NormalDist
from typing import NamedTuple

from negamax.config.kv_cache import KvCacheSpecs, block_bytes, set_index_dtype, split_over_holders
from negamax.config.model_spec import ModelSpec
from negamax.formats.floats import E4M3_BLOCKS, PLAIN
from negamax.formats.platform import Feature
from negamax.formats.readable import is_kept
from negamax.formats.tensor_format import TensorFormat
from negamax.models.drafts import DraftSpec
from negamax.models.memory import Kept, ModelWeights, WeightKind, hit_share
from negamax.options.speculation import MAX_DRAFT_TOKENS, SpeculationConfig
from negamax.parallel.layout import ParallelLayout
from negamax.planner.floor import cached_bytes
from negamax.planner.gpus import MEASURED, GpuModel

# Fractions of the vendor's bandwidth and FLOP/s that kernels reach. Copies, FP8 block GEMMs and
# plain GEMMs read 4.25 of 4.8 TB/s. Weight-only GEMMs read `WEIGHT_ONLY_SHARES[bits]` of 4.25.
READ_SHARE = 4.25 / 4.8
WEIGHT_ONLY_SHARES = {8: 0.85, 4: 0.80}
DENSE_FP8, EXPERTS_FP8 = 1100 / 1979, 640 / 1979
DENSE_BF16, EXPERTS_BF16, WEIGHT_ONLY = 0.75, 0.40, 0.52
ATTENTION_SHARE = 280 / 989
# Besides memory reads, a layer takes time for nine dependent kernels, per sqrt(rows), per token.
# With one or two rows on one rank, a layer runs eight kernels, which takes about 1 us less.
LAYER_SECONDS, ROW_SECONDS, TOKEN_SECONDS = 23e-6, 3.6e-6, 0.08e-6
MOST_ROWS = 256  # Rows beyond this number add no ROW_SECONDS.
# Sums of up to SMALL_SUM_TOKENS tokens, larger sums and gathers reach `*_SHARE` of link bandwidth.
SMALL_SUM_TOKENS, SMALL_SUM_SHARE, SUM_SHARE, GATHER_SHARE = 256, 0.30, 0.84, 0.60
SUM_SECONDS, NORM_SECONDS = 1e-6, 2e-6  # Fixed time of a sum over ranks, and time of a QK norm.
MESSAGE_SECONDS = 20e-6  # NCCL's latency of one message.
MERGE_SECONDS = 4e-6  # Calculated time to merge the attention results of DCP ranks.
# `DRAFT_RATES`: assumed probabilities that a step accepts the first, second, ... draft token.
DRAFT_RATES = [0.65**place for place in range(1, MAX_DRAFT_TOKENS + 1)]
DRAFT_SECONDS = 0.4e-3  # Additional time of a step with a draft model, fitted to EAGLE3 drafts.
NETWORK_BYTES = 45e9  # Bytes per second of a GPU to other machines, with a 400 Gb/s adapter.


@dataclass(frozen=True)
class Workload:
    """A number of concurrent requests, with the lengths of their prompts and answers."""

    concurrency: int
    input_len: int = 1000
    output_len: int = 1000

    @property
    def tokens(self) -> int:
        """Number of tokens of a finished request."""
        return self.input_len + self.output_len

    @property
    def context(self) -> float:
        """Number of tokens in the context when half of the answer is generated."""
        return self.input_len + self.output_len / 2


@dataclass(frozen=True)
class Drafts:
    """Draft tokens of a draft model, or of n-gram lookup if `spec` is None."""

    speculation: SpeculationConfig
    spec: DraftSpec | None = None


@dataclass(frozen=True)
class Model:
    """A model as GPUs store it: weights, caches and dtypes."""

    weights: ModelWeights
    kept: Kept
    caches: KvCacheSpecs
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"

    @staticmethod
    def of(
        spec: ModelSpec, gpu: GpuModel, *, kv_dtype: str = "auto", index_dtype: str = "auto"
    ) -> "Model":
        """Return the model as `gpu` stores it. "auto" selects the dtype of the model."""
        dtype = "bfloat16" if spec.dtype == "float32" else spec.dtype
        caches = set_index_dtype(spec.kv_caches(), dtype if index_dtype == "auto" else index_dtype)
        return Model(
            ModelWeights(spec),
            partial(is_kept, platform=gpu.platform),
            caches,
            dtype,
            kv_dtype=dtype if kv_dtype == "auto" else kv_dtype,
        )

    def on_rank(self, layout: ParallelLayout) -> Iterable[tuple[WeightKind, int, float]]:
        """Yield (kind, number of matrices, total bytes) for each kind of matrix on a rank."""
        return self.weights.on_rank(dtype=self.dtype, kept=self.kept, layout=layout)

    @property
    def shards_index(self) -> bool:
        """Whether each rank holds a shard of the index keys."""
        return any(cache.is_sharded for layer in self.caches for cache in layer)


class _Held(NamedTuple):
    """Matrices of one kind on one rank."""

    kind: WeightKind
    count: int
    num_bytes: float
    read: float  # Bytes per second that GEMMs read from memory.
    rate: float  # Operations per second of GEMMs.


class Costs:
    """Predicts times of one layout on GPUs of one kind, with `per_node` GPUs in a machine."""

    def __init__(
        self, model: "Model", gpu: GpuModel, layout: ParallelLayout, *, per_node: int
    ) -> None:
        self._model, self._gpu, self._layout = model, gpu, layout
        places = range(0, layout.world_size, layout.stage_size)
        self._stages = [layout.replace_rank(rank) for rank in places]
        self._caches = [
            split_over_holders(model.caches[layers.start : layers.stop], layout.dcp)
            for layers in (stage.layers(model.weights.spec.num_layers) for stage in self._stages)
        ]
        self._kinds_of_caches = [Counter(map(tuple, caches)) for caches in self._caches]
        self._row_bytes = [  # cache bytes of a token in all layers of each stage
            block_bytes(caches, 1, dtype=model.kv_dtype, ranks=layout.tp) for caches in self._caches
        ]
        self._held = [
            [
                _Held(kind, count, num_bytes, *self._rates(kind, kind.stored(stage)))
                for kind, count, num_bytes in model.on_rank(stage)
                if not kind.weight.is_vision
            ]
            for stage in self._stages
        ]
        self._is_local = layout.stage_size <= per_node
        self._hops_locally = layout.world_size <= per_node

    def decode_seconds(self, concurrency: int, *, context: float, rows: int = 1) -> float:
        """Return the time of a step of `concurrency` sequences with `rows` tokens each."""
        batches = min(self._layout.pp, concurrency)
        batch = ceil(concurrency / batches)
        sizes = {"tokens": batch * rows, "own": ceil(batch / self._layout.dp) * rows}
        stages = [
            self._stage(place, **sizes, context=context, is_prefill=False, width=rows)
            for place in range(self._layout.pp)
        ]
        return max(sum(stages), batches * max(stages)) + self._hops(sizes["own"])

    def token_seconds(
        self, concurrency: int, *, context: float, drafts: Drafts | None
    ) -> tuple[float, int]:
        """Return the least seconds per token of a sequence, and the draft length with this time."""
        if drafts is None:
            return self.decode_seconds(concurrency, context=context), 0
        settings, block, once = drafts.speculation, None, 0.0
        if drafts.spec is not None:
            block, layout = drafts.spec.most_tokens, replace(self._layout, pp=1, cp=1, ep=1, dcp=1)
            model = Model.of(drafts.spec, self._gpu, kv_dtype=self._model.kv_dtype)
            drafter = Costs(model, self._gpu, layout, per_node=layout.world_size)
            once = drafter.decode_seconds(concurrency, context=context, rows=block or 1)
        rates, found = settings.synthetic_acceptance_rates or DRAFT_RATES, []
        for count in {0, *settings.lengths} if settings.adaptive else settings.lengths:
            seconds = self.decode_seconds(concurrency, context=context, rows=count + 1)
            if once and count:
                seconds += DRAFT_SECONDS + once * (1 if block else count)
            found.append((seconds / (1 + sum(rates[:count])), count))
        return min(found)

    def prefill_seconds(self, num_tokens: int, *, chunk: int) -> float:
        """Return the time to first token of a single prompt of `num_tokens`."""
        whole, rest = divmod(num_tokens, chunk)
        return self.chunks_seconds([chunk] * whole + [rest] * (rest > 0))

    def chunks_seconds(self, chunks: Iterable[int]) -> float:
        """Return the time to first token of one prompt if the stages run `chunks` concurrently."""
        ended = [0.0] * self._layout.pp  # time in seconds at which each stage ends its latest chunk
        done = 0
        for size in chunks:
            hop, arrived = self._hops(size) / max(1, self._layout.pp - 1), 0.0
            for place, seconds in enumerate(self._prefill(size, ranks=1, after=done)):
                ended[place] = max(ended[place], arrived) + seconds
                arrived = ended[place] + hop
            done += size
        return ended[-1]

    def chunk_seconds(self, size: int, *, after: int) -> float:
        """Return the slowest stage's time for `size` prompt tokens that follow `after` tokens."""
        return max(self._prefill(size, ranks=1, after=after))

    def prefill_rate(self, prompt: int, *, chunk: int) -> float:
        """Return prompt tokens per second if all ranks compute prompts of `prompt` tokens."""
        after = max(0, prompt - chunk) / 2
        stages = self._prefill(chunk, ranks=self._layout.dp, after=after, prompt=prompt)
        return self._layout.dp * chunk / max(stages)

    def _prefill(
        self, size: int, *, ranks: int, after: float, prompt: int | None = None
    ) -> list[float]:
        """Return each stage's seconds if each of `ranks` ranks prefills `size` tokens."""
        visible = after + min(size, prompt or size) / 2
        return [
            self._stage(place, tokens=size * ranks, own=size, context=visible, is_prefill=True)
            for place in range(self._layout.pp)
        ]

    def _stage(
        self, place: int, *, tokens: int, own: int, context: float, is_prefill: bool, width: int = 1
    ) -> float:
        """Return the seconds of stage `place` for `tokens` tokens, `own` per data-parallel rank."""
        layout, gpu, spec = self._stages[place], self._gpu, self._model.weights.spec
        layers = layout.layers(spec.num_layers)
        own = ceil(own / layout.cp) if is_prefill else own
        bandwidth = READ_SHARE * gpu.bandwidth
        seconds = 0.0
        for held in self._held[place]:
            if not held.kind.weight.is_table:
                rows = 0 if is_prefill and held.kind.weight.is_head else own
                seconds += self._product(held, tokens=tokens, own=rows)
        caches = self._caches[place]
        if is_prefill:
            seen = sum(
                count * max((c.read_tokens(context) for c in layer if not c.is_index), default=0.0)
                for layer, count in self._kinds_of_caches[place].items()
            )
            operations = 4.0 * own * (spec.num_heads / layout.tp) * spec.head_dim * seen
            seconds += operations / (ATTENTION_SHARE * gpu.bf16)
        else:
            cached = cached_bytes(caches, context, dtype=self._model.kv_dtype, ranks=layout.tp)
            seconds += own / width * cached / bandwidth
        relative = MEASURED.bandwidth / gpu.bandwidth
        seconds += len(layers) * (
            LAYER_SECONDS
            + ROW_SECONDS * sqrt(min(own, MOST_ROWS))
            + TOKEN_SECONDS * relative * own / layout.tp
            + self._exchanges(own, ranks=layout.dp * (layout.cp if is_prefill else 1))
        )
        seconds += len(layers) * self._merge_seconds(own)
        return seconds + self._context_seconds(place, own, is_prefill=is_prefill)

    def _product(self, held: _Held, *, tokens: int, own: int) -> float:
        """Return the GEMM time of `held`. Experts have `tokens` rows, other matrices `own` rows."""
        weight, layout = held.kind.weight, self._layout
        hit = hit_share(weight, tokens)
        ranks = layout.tp // (layout.dcp if weight.is_query else 1)
        rows = float(own)
        if weight.used is not None:
            # The busiest of `ep` ranks reads more experts than the ranks read on average.
            deviation = sqrt(hit * (1 - hit) * layout.ep / weight.count)
            hit = min(1.0, hit + _beyond_mean(layout.ep) * deviation)
            rows = tokens * weight.used / weight.count
            ranks = layout.stage_size
        ranks = min(ranks, weight.parts or ranks)
        operations = 2.0 * held.count * weight.num_elements * rows / ranks
        return max(hit * held.num_bytes / held.read, operations / held.rate)

    def _rates(self, kind: WeightKind, stored: TensorFormat) -> tuple[float, float]:
        """Return bytes and operations per second of GEMMs whose weights are of `kind`."""
        gpu, is_expert = self._gpu, kind.weight.used is not None
        full = READ_SHARE * gpu.bandwidth
        if stored is PLAIN or not self._model.kept(stored):
            return full, (EXPERTS_BF16 if is_expert else DENSE_BF16) * gpu.bf16
        bits = 4 if stored.bytes_per_weight((4096, 4096)) < 0.75 else 8
        read, rate = WEIGHT_ONLY_SHARES[bits] * full, WEIGHT_ONLY * gpu.bf16
        is_blocks = stored.name == E4M3_BLOCKS.name
        if (is_blocks or stored.activation) and Feature.FP8 in gpu.platform.features:
            read = full if is_blocks else read
            rate = (EXPERTS_FP8 if is_expert else DENSE_FP8) * gpu.fp8
        return read, rate

    def _exchanges(self, own: int, *, ranks: int) -> float:
        """Return the time of one layer's exchanges between `ranks` ranks with `own` tokens each."""
        layout, hidden = self._layout, self._model.weights.spec.hidden_size
        found = 0.0
        if layout.tp > 1:
            found += 2 * self._sum_seconds(own, layout.tp) + NORM_SECONDS
        others = ranks - 1
        if others:
            # Ranks send rows in FP8 with scales, ids and weights, and get results in bf16.
            received = others * own * ((hidden + hidden / 32 + 64) + 2 * hidden)
            found += 2 * MESSAGE_SECONDS + received / self._gather_link
        return found

    def _context_seconds(self, place: int, own: int, *, is_prefill: bool) -> float:
        """Return PCP's time to exchange keys and values (prefill) or to sum outputs (decode)."""
        ranks, num_layers = self._layout.cp, len(self._caches[place])
        if ranks == 1:
            return 0.0
        if is_prefill:
            received = (ranks - 1) * own * self._row_bytes[place]
        else:
            hidden = self._model.weights.spec.hidden_size
            received = num_layers * 2 * (ranks - 1) // ranks * own * 2 * hidden
        return num_layers * MESSAGE_SECONDS + received / self._gather_link

    def _merge_seconds(self, own: int) -> float:
        """Return DCP's time to exchange a layer's outputs and a 4-byte weight per head."""
        layout, spec = self._layout, self._model.weights.spec
        if layout.dcp == 1:
            return 0.0
        heads = spec.num_heads / layout.tp * layout.dcp
        received = (layout.dcp - 1) * own * heads * (2 * spec.head_dim + 4)
        if self._gpu.has_fabric and own <= SMALL_SUM_TOKENS:  # each rank gets only its own heads
            return MERGE_SECONDS + received / layout.dcp / (SMALL_SUM_SHARE * self._gpu.link)
        return MESSAGE_SECONDS + received / self._gather_link

    @property
    def _gather_link(self) -> float:
        """Return the bytes per second that reach a rank from the other ranks of its stage."""
        return GATHER_SHARE * self._gpu.link if self._is_local else NETWORK_BYTES

    def _sum_seconds(self, tokens: int, ranks: int) -> float:
        """Return the time to sum `tokens` rows over `ranks` ranks of one machine."""
        hidden, gpu = self._model.weights.spec.hidden_size, self._gpu
        num_bytes = 2 * (ranks - 1) / ranks * tokens * 2 * hidden
        if not gpu.has_fabric:
            return MESSAGE_SECONDS + num_bytes / (SUM_SHARE * gpu.link)
        share = SMALL_SUM_SHARE if tokens <= SMALL_SUM_TOKENS else SUM_SHARE
        return SUM_SECONDS + num_bytes / (share * gpu.link)

    def _hops(self, tokens: int) -> float:
        num_bytes = 2 * tokens * self._model.weights.spec.hidden_size
        link = GATHER_SHARE * self._gpu.link if self._hops_locally else NETWORK_BYTES
        return (self._layout.pp - 1) * (MESSAGE_SECONDS + num_bytes / link)


def _beyond_mean(count: int) -> float:
    """Return the expected maximum of `count` standard normal numbers (Blom's approximation)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def tokens_per_second(workload: Workload, *, decode_seconds: float, prefill_rate: float) -> float:
    """Return tokens per second in steady state, where prompts run between decode steps."""
    tokens = workload.concurrency * workload.output_len
    reading = workload.concurrency * workload.input_len / prefill_rate
    return tokens / (workload.output_len * decode_seconds + reading)
