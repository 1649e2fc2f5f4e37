"""Check a loaded model before it serves (`--self-check`).

Every rank runs single operations of three models on the same fixed inputs. The check compares the
results:

    loaded        the model that will serve
    read again    the same kernels with weights of a few layers that are read once more; results
                  must be bit-identical, or the loaded weights differ from the checkpoint
    definition    the reference of each op with the same weights; results must be equal within the
                  tolerance of the ops

The check covers the first layer of each kind (full or sparse attention, MLP or experts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from negamax.base.errors import ConfigError
from negamax.base.log import get_logger
from negamax.checkpoint.loader import fill
from negamax.checkpoint.plan import LoadPlan
from negamax.checkpoint.synthetic import fill_synthetic
from negamax.formats.tensor_format import StoredWeight
from negamax.kernels.activations import Hidden, SwiGlu, unquantized
from negamax.kernels.attention.metadata import AttentionMetadata, attention_metadata
from negamax.kernels.attention.op import PREFILL, QK_NORM_ROPE_WRITE
from negamax.kernels.block_sparse.op import BLOCK_SPARSE_NORM_ROPE_WRITE
from negamax.kernels.collectives.op import ALL_REDUCE_ADD_RMS
from negamax.kernels.gemm.op import LINEAR
from negamax.kernels.mlp.op import SWIGLU
from negamax.kernels.moe.op import EXPERTS, ROUTE, SelectedExperts
from negamax.kernels.norm.op import ADD_RMS
from negamax.kernels.op import AnyKernel, AnyOp
from negamax.kernels.registry import OPS, KernelTable
from negamax.kernels.steps.op import EMBED_TOKENS
from negamax.layers.attention import KvCaches
from negamax.layers.moe import SparseMoe
from negamax.models.build import build_model
from negamax.models.decoder import Decoder, DecoderLayer
from negamax.parallel.collectives import Partial
from negamax.quantization.detect import detect
from negamax.worker import kv_cache

if TYPE_CHECKING:
    from negamax.worker.runner import ModelRunner

logger = get_logger(__name__)

_NUM_TOKENS, _NUM_DECODES, _NUM_CACHED = 48, 8, 5  # tokens; decodes; cached tokens per decode
_EIGHT_BIT_ERROR, _FP8_CACHE_ERROR = 6e-2, 2e-2  # extra error allowed for 8-bit GEMMs; FP8 cache
_MOST_LISTED = 3  # maximum number of differences in an error message


@dataclass(frozen=True)
class _Result:
    """The result of one operation, and the ops that compute the result, in order."""

    name: str
    value: Tensor
    ops: tuple[AnyOp, ...]
    # [T, experts] fp32, router scores, if `value` contains expert ids; None for other operations
    scores: Tensor | None = None


class SelfCheck:
    """Checks layers of one rank. `plan` is the load plan of the model (None: synthetic weights)."""

    def __init__(
        self, runner: ModelRunner, plan: LoadPlan | None, *, cache_dtype: torch.dtype
    ) -> None:
        config, kernels = runner.config, runner.kernels
        self._config, self._plan, self._kernels = config, plan, kernels
        self._context, self._cache_dtype, self._device = runner.context, cache_dtype, runner.device
        self._num_tokens = min(_NUM_TOKENS, config.max_num_batched_tokens)
        scheme = detect(config.spec.quantization)
        chosen = [
            kernels.choose(op, stored)
            for stored in (scheme.formats if scheme else ())
            for op in (LINEAR, EXPERTS)
        ]
        self._slack = _EIGHT_BIT_ERROR * any(each and each.multiplies_8_bits for each in chosen)
        self._slack += _FP8_CACHE_ERROR * (cache_dtype.itemsize == 1)

    def run(self, model: Decoder, warm_up: Callable[[], Any] | None = None) -> str:
        """Check the loaded `model`, and return a line for the log. Every rank must call `run`.
        After all ranks have compared, raises `ConfigError` with the wrong ops and the rank.
        """
        layers = _choose_layers(model.layers)
        if warm_up is not None:
            with warm_up():
                self._probe(model, layers)
        loaded = self._probe(model, layers)
        again = self._probe(self._read_again(self._kernels, max(layers) + 1), layers)
        problems = [
            f"{one.name} differs from the same kernels ({self._name_kernels(one)}) with weights "
            f"that were read again: the loaded weights differ from the checkpoint"
            for one, other in zip(loaded, again, strict=True)
            if not torch.equal(one.value, other.value)
        ]
        # if the weights of any rank are wrong, all ranks skip the comparison with reference kernels
        if self._context.world_min(not problems):
            defined = self._probe(self._read_again(self._define(), max(layers) + 1), layers)
            problems = [
                f"{one.name} differs from its definition by {error:.1e}; the limit is {limit:.0e}; "
                f"kernels: {self._name_kernels(one)}"
                for one, other in zip(loaded, defined, strict=True)
                for error, limit in [(_compare(one, other), self._limit(one))]
                if not error <= limit
            ]
        rank = self._context.layout.rank
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._context.world_min(0)  # wait until all ranks have ended the comparison
        if problems:
            raise ConfigError(
                f"--self-check: rank {rank}: {'; '.join(problems[:_MOST_LISTED])}",
                hint="check the files with `negamax doctor`, or choose other kernels with "
                "--kernels OP=reference",
            )
        return f"; self-check: {len(loaded)} results of {len(layers)} layers are correct"

    def _name_kernels(self, result: _Result) -> str:
        return ", ".join(f"{op}={self._kernels.candidates[op][0].provider}" for op in result.ops)

    def _limit(self, result: _Result) -> float:
        total = sum(op.wide_error for op in result.ops)
        return 0.0 if result.ops == (EMBED_TOKENS,) else total + self._slack

    def _define(self) -> KernelTable:
        """Return a kernel table that selects every op's reference and keeps the weight formats."""
        table: dict[AnyOp, tuple[AnyKernel, ...]] = {op: (op.reference,) for op in OPS.values()}
        for op, run, prepare in (
            (LINEAR, LINEAR.reference.run, LINEAR.reference.prepare),
            (EXPERTS, _run_one_by_one, _Experts),
        ):

            def is_read(stored: Any, op: AnyOp = op) -> bool:
                return self._kernels.choose(op, stored) is not None

            table[op] = (replace(op.reference, run=run, prepare=prepare, reads=is_read),)
        return replace(self._kernels, candidates=table)

    def _read_again(self, kernels: KernelTable, count: int) -> Decoder:
        """Load the first `count` layers of this stage once more."""
        config, context = self._config, self._context
        layout, num_layers = context.layout, config.spec.num_layers
        before = layout.pipeline_ranks[: layout.pp_rank]
        sizes = [len(layout.replace_rank(rank).layers(num_layers)) for rank in before]
        sizes += [count, *[1] * (layout.pp - layout.pp_rank - 1)]
        spec, own = config.spec.first_layers(sum(sizes)), replace(layout, partition=tuple(sizes))
        context = replace(context, layout=own)
        model = build_model(spec, context=context, device=self._device, kernels=kernels)
        slots = model.weight_slots()
        if self._plan is None:
            fill_synthetic(slots, config.spec, config.seed, device=self._device)
        else:
            moves = [move for move in self._plan.moves if move.slot.name in slots]
            fill(slots, replace(self._plan, moves=moves, skipped={}))
        model.finish_loading()
        return model

    def _probe(self, model: Decoder, layers: Sequence[int]) -> list[_Result]:
        return [*self._run_ends(model), *self._run_layers(model, layers)]

    def _draw(self, *shape: int, seed: int = 0) -> Tensor:
        """Draw the same normal numbers on every rank. The first row is 0."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(shape, generator=generator)
        drawn[0] = 0  # for a zero row, the router selects experts by its bias alone
        return drawn.to(self._device)

    def _run_ends(self, model: Decoder) -> Iterator[_Result]:
        num_tokens, vocab = self._num_tokens, model.spec.vocab_size
        if model.is_first_stage:
            token_ids = torch.arange(num_tokens, device=self._device) * (vocab // num_tokens)
            yield _Result("the embedding", model.embed(token_ids)[0].x, (EMBED_TOKENS,))
        if model.is_last_stage:
            x = self._draw(num_tokens, model.spec.hidden_size).to(model.dtype)
            hidden = model.last_norm(Partial(x, self._context.attention_group), x.clone())
            yield _Result("the head", model.local_logits(hidden), (ADD_RMS, LINEAR))

    def _run_layers(self, model: Decoder, layers: Sequence[int]) -> Iterator[_Result]:
        caches, metadata = self._fill_caches(model, max(layers) + 1)
        x = self._draw(self._num_tokens, model.spec.hidden_size).to(model.dtype)
        group = self._context.attention_group
        norm = ADD_RMS if group.size == 1 else ALL_REDUCE_ADD_RMS
        for at in layers:
            layer, kv, name = model.layers[at], caches[at], f"layer {self._number(at)}"
            hidden = layer.input_norm(Partial(x.clone(), group), x.clone())
            yield _Result(f"{name}: the norm before attention", unquantized(hidden), (norm,))
            attended = layer.attention(hidden, metadata, kv)
            write = BLOCK_SPARSE_NORM_ROPE_WRITE if "index" in kv else QK_NORM_ROPE_WRITE
            for kind, cache in kv.items():
                what = _CACHES.get(kind, kind)
                yield _Result(f"{name}: {what}", cache.float(), (LINEAR, write))
            ops = (LINEAR, write, PREFILL, LINEAR)
            yield _Result(f"{name}: the attention", _sum_parts(attended), ops)
            yield from self._run_mlp(layer, x, name)

    def _run_mlp(self, layer: DecoderLayer, x: Tensor, name: str) -> Iterator[_Result]:
        part = Partial(x.clone(), self._context.attention_group)
        residual, mlp = x.clone(), layer.mlp
        if not isinstance(mlp, SparseMoe):
            out = mlp(layer.post_norm(part, residual))
            yield _Result(f"{name}: the MLP", _sum_parts(out), (LINEAR, SWIGLU, LINEAR))
            return
        hidden, ids, weights = mlp.route_after(layer.post_norm, part, residual)
        scores, top_k = mlp.rank_experts(unquantized(hidden)), mlp.top_k
        yield _Result(f"{name}: the router", ids[:, :top_k].long(), (ADD_RMS, ROUTE), scores)
        yield _Result(f"{name}: the router's weights", weights.sort(-1).values, (ADD_RMS, ROUTE))
        # replace the router's expert ids, so that every expert runs
        every = torch.arange(ids[:, :top_k].numel(), device=ids.device) % mlp.num_experts
        ids[:, :top_k], weights[:, :top_k] = every.view(-1, top_k), 1 / top_k
        out = mlp.run_experts(hidden, ids, weights)
        yield _Result(f"{name}: the experts", _sum_parts(out), (ADD_RMS, EXPERTS))

    def _number(self, at: int) -> int:
        return self._context.layout.layers(self._config.spec.num_layers)[at]

    def _fill_caches(self, model: Decoder, count: int) -> tuple[list[KvCaches], AttentionMetadata]:
        """Fill caches of `count` layers. Return metadata of some decodes and one prompt."""
        config, num_tokens = self._config, self._num_tokens
        decodes = min(_NUM_DECODES, num_tokens - 1)
        lengths = [_NUM_CACHED + 1] * decodes + [num_tokens - decodes]
        each = -(-max(lengths) // config.block_size)
        caches = kv_cache.allocate_own(
            config, each * len(lengths), layers=count, dtype=self._cache_dtype, device=self._device
        )
        for seed, cache in enumerate(each for layer in caches for each in layer.values()):
            cache.copy_(self._draw(*cache.shape, seed=seed))
        tables = torch.arange(each * len(lengths), device=self._device).view(-1, each)
        query_lens = [1] * decodes + lengths[decodes:]
        metadata = attention_metadata(tables, lengths, query_lens, num_decodes=decodes)
        return caches, model.prepare(metadata, caches)


_CACHES = {"k": "the keys after K norm and rope", "v": "the values", "index": "the index keys"}


def _choose_layers(layers: Sequence[DecoderLayer]) -> list[int]:
    """Return the index of the first layer of each kind."""
    kinds = [(type(layer.attention), type(layer.mlp)) for layer in layers]
    return sorted({kinds.index(kind) for kind in kinds})


def _compare(one: _Result, other: _Result) -> float:
    """Return the relative error of a result. For routers, return the largest score difference."""
    if other.scores is None:
        size = other.value.float().norm().clamp_min(1e-30)
        return float((one.value.float() - other.value.float()).norm() / size)
    # compare the scores of the selected experts, because ids with nearly equal scores may differ
    found, wanted = (other.scores.gather(1, each.value).sort(-1).values for each in (one, other))
    return float((found - wanted).abs().max())


def _sum_parts(part: Partial) -> Tensor:
    return part.x.float() if part.x.dim() == 2 else part.x.float().sum(1)


class _Experts:
    """Stored experts, which are dequantized one by one to save memory."""

    def __init__(
        self, gate_up: StoredWeight, down: StoredWeight, *, activation: SwiGlu, shared: bool
    ) -> None:
        self._weights, self._activation = (gate_up, down), activation

    def dequantize(self, expert: int) -> Any:
        """Return one dequantized expert in the format that `EXPERTS.reference` reads."""
        one = slice(expert, expert + 1)
        gate_up, down = (
            StoredWeight(each.format, {name: held[one] for name, held in each.tensors.items()})
            for each in self._weights
        )
        return EXPERTS.reference.prepare(gate_up, down, activation=self._activation)


def _run_one_by_one(x: Hidden, selected: SelectedExperts, held: _Experts, /) -> Tensor:
    values = unquantized(x)
    out = torch.zeros(values.shape, dtype=torch.float32, device=values.device)
    for expert in range(selected.num_local):
        stacked, first = held.dequantize(expert), selected.first + expert
        alone = SelectedExperts(selected.ids, selected.weights, first, 1)
        out += EXPERTS.reference.run(values.to(stacked.gate_up.dtype), alone, stacked)
    return out.to(values.dtype)
