"""Make small random EAGLE3 drafts in three file layouts; compute their proposals in PyTorch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from operator import ne
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from negamax.worker.block_drafts import BlockProposer
from negamax.worker.eagle3 import Eagle3Proposer
from negamax.worker.proposer import DraftRows
from negamax.worker.request_state import RequestState
from tests import tiny_block_draft

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Weights = dict[str, Tensor]
Proposal = tuple[list[int], list[int]]  # known tokens, and the draft tokens that follow

# differences of drafts: config fields, own embedding and head, and file layout ("specforge")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"draft_vocab_size": 40, "num_key_value_heads": 2},
    "32-bit offsets": {
        "draft_vocab_size": 40, "num_key_value_heads": 2, "own_embedding": True,
        "offsets": torch.int32,
    },
    "full vocabulary, norms": {
        "fc_norm": True, "norm_output": True, "own_embedding": True, "layout": "torchspec",
    },
    "borrows embedding and head": {"norm_before_residual": True, "own_head": False},
    "biases, two layers": {
        "attention_bias": True, "num_hidden_layers": 2, "norm_before_fc": True,
        "layout": "torchspec", "draft_vocab_size": 50, "num_key_value_heads": 1,
    },
    "another width": {
        "hidden_size": 24, "own_embedding": True, "draft_vocab_size": 64, "fc_norm": True,
    },
    "speculators": {
        "norm_before_residual": True, "own_embedding": True, "draft_vocab_size": 40,
        "layout": "speculators",
    },
}  # fmt: skip


def config(*, vocab_size: int, target_hidden_size: int, **fields: Any) -> dict[str, Any]:
    own = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
        "vocab_size": vocab_size, "draft_vocab_size": vocab_size,
        "target_hidden_size": target_hidden_size, "hidden_size": target_hidden_size,
        "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 8, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    return own | fields


def weights(
    config: dict[str, Any], seed: int, *, own_embedding: bool = False, own_head: bool = True
) -> Weights:
    """Make random tensors under SpecForge's names, with clearly separated logits."""
    generator = torch.Generator().manual_seed(seed)
    hidden, target = config["hidden_size"], config["target_hidden_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim, width = config["head_dim"], config["intermediate_size"]

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm(size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    made = {"fc.weight": matrix(hidden, 3 * target), "norm.weight": norm(hidden)}
    if config.get("norm_before_fc"):
        made["input_norm.weight"] = norm(3 * target)
    if config.get("fc_norm"):
        made |= {f"fc_norm.{i}.weight": norm(target) for i in range(3)}
    for layer in range(config["num_hidden_layers"]):
        own = "midlayer" if config["num_hidden_layers"] == 1 else f"midlayer.{layer}"
        inputs = hidden if layer else 2 * hidden
        for part, rows in {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}.items():
            made[f"{own}.self_attn.{part}_proj.weight"] = 2 * matrix(rows, inputs)
            if config.get("attention_bias"):
                made[f"{own}.self_attn.{part}_proj.bias"] = 0.5 * norm(rows)
        made[f"{own}.self_attn.o_proj.weight"] = matrix(hidden, heads * dim)
        if config.get("attention_bias"):
            made[f"{own}.self_attn.o_proj.bias"] = 0.5 * norm(hidden)
        for part, shape in (
            ("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))
        ):  # fmt: skip
            made[f"{own}.mlp.{part}_proj.weight"] = matrix(*shape)
        norms = ("input_layernorm", "post_attention_layernorm", "hidden_norm")
        for name in norms[: 2 if layer else 3]:
            made[f"{own}.{name}.weight"] = norm(hidden)
    size, vocab_size = config["draft_vocab_size"], config["vocab_size"]
    if own_embedding:
        made["embed_tokens.weight"] = torch.randn(vocab_size, hidden, generator=generator)
    if own_head:
        made["lm_head.weight"] = 3 * matrix(size, hidden)
    if size < vocab_size:
        ids = torch.randperm(vocab_size, generator=generator)[:size].sort().values
        made["d2t"] = ids - torch.arange(size)
        made["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return made


def save(
    config: dict[str, Any], tensors: Weights, folder: Path, *, layout: str = "specforge"
) -> str:
    several = config["num_hidden_layers"] > 1
    old, new = ("midlayer.", "layers.") if several else ("midlayer.", "layers.0.")
    if layout == "torchspec":
        tensors = {
            f"model.{name}".replace(f"model.{old}", f"model.{new}")
            if "layer" in name
            else name: one
            for name, one in tensors.items()
        }
        config = config | {"architectures": ["Eagle3LlamaForCausalLM"]}
    elif layout == "speculators":
        tensors = {name.replace(old, new): one for name, one in tensors.items()}
        config = as_speculators(config)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors"
    )
    return str(folder)


def as_speculators(
    config: dict[str, Any], *, verifier: str | None = None, speculative_tokens: int = 3
) -> dict[str, Any]:
    """Return a config.json as the speculators library writes it."""
    own = ("norm_before_fc", "fc_norm", "norm_output", "draft_vocab_size", "target_hidden_size")
    left = ("architectures", "eagle_config", "norm_before_residual", "torch_dtype", *own)
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    method = {
        "accept_tolerance": 0.0, "proposal_type": "greedy",
        "speculative_tokens": speculative_tokens, "verifier_accept_k": 1,
    }  # fmt: skip
    return {
        "architectures": ["Eagle3Speculator"], "embed_requires_grad": False,
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"}, "has_no_defaults_at_init": False,
        "eagle_aux_hidden_state_layer_ids": ids and [number + 1 for number in ids],
        "norm_before_residual": config.get("norm_before_residual", False),
        **{name: config.get(name) for name in own},
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"architectures": ["MiniMaxM2ForCausalLM"], "name_or_path": verifier},
        },
        "speculators_model_type": "eagle3", "speculators_version": "0.4.0",
        "torch_dtype": config["torch_dtype"], "transformers_version": "4.57.1",
        "transformer_layer_config": {
            name: value for name, value in config.items() if name not in left
        },
    }  # fmt: skip


def make(
    variant: str, folder: Path, *, vocab_size: int, hidden_size: int, ids: list[int]
) -> tuple[dict[str, Any], Weights, str]:
    """Write a variant that reads the outputs of layers `ids`. Return config, tensors and path."""
    if variant in tiny_block_draft.VARIANTS:
        sizes = {"vocab_size": vocab_size, "hidden_size": hidden_size}
        fields = tiny_block_draft.config(variant, **sizes, ids=ids)
        tensors = tiny_block_draft.weights(variant, fields, 7)
        stored = tensors
        if "quantization_config" in fields:
            stored = tiny_block_draft.quantize(tensors)
        if "dspark_block_size" in fields:
            stored = tiny_block_draft.respell(stored)
        return fields, tensors, save(fields, stored, folder)
    parts = ("own_embedding", "own_head", "layout", "offsets")
    options = VARIANTS[variant]
    own = {name: value for name, value in options.items() if name not in parts}
    nested = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    sizes = {"vocab_size": vocab_size, "target_hidden_size": hidden_size}
    fields = config(**sizes | {"eagle_config": nested} | own)
    made = {name: options[name] for name in ("own_embedding", "own_head") if name in options}
    tensors = weights(fields, 7, **made)
    if "offsets" in options:
        tensors["d2t"] = tensors["d2t"].to(options["offsets"])
    layout = options.get("layout", "specforge")
    return fields, tensors, save(fields, tensors, folder, layout=layout)


def watch(
    patch: Callable[[object, str, Any], None], texts: Sequence[list[int]] = ()
) -> list[Proposal]:
    """Record the known tokens and the proposal of every call in this process.

    Then replace the tokens by tokens of `texts`, of which 0 to all are correct.
    """
    seen: list[Proposal] = []
    own = {proposer: proposer.propose for proposer in (Eagle3Proposer, BlockProposer)}

    def record(
        self: Any, states: Any, rows: DraftRows, requests: RequestState, num_tokens: int
    ) -> Tensor:
        drafts = own[type(self)](self, states, rows, requests, num_tokens)
        columns = rows.slots.tolist(), rows.lengths.tolist(), drafts
        for slot, length, row in zip(*columns, strict=True):
            known = requests.tokens[slot, :length].tolist()
            seen.append((known, row.tolist()))
            for text in texts:
                if num_tokens and text[:length] == known and len(text) >= length + num_tokens:
                    row[:] = torch.tensor(text[length : length + num_tokens])
                    row[length % (num_tokens + 1) :] += 1
        return drafts

    for proposer in own:
        patch(proposer, "propose", record)
    return seen


def count_differing(
    seen: Iterable[Proposal],
    target: PreTrainedModel,
    texts: Sequence[list[int]],
    layers: Sequence[int],
    config: dict[str, Any],
    tensors: Weights,
    inputs: Sequence[dict[str, Any]] | None = None,
) -> tuple[int, int]:
    """Return how many draft tokens differ from the oracle's, and how many there are. `inputs`: the
    target's arguments for the images of each text.
    """
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    of_block = any(name.endswith("block_size") for name in config)
    make_oracle = tiny_block_draft.Oracle if of_block else Oracle
    oracle = make_oracle(config, tensors, embedding=embedding.detach(), head=head.detach())
    streams = {}
    for text, own in zip(texts, inputs or [{}] * len(texts), strict=True):
        with torch.no_grad():
            found = target(torch.tensor([text]), output_hidden_states=True, **own).hidden_states
        # transformers normalizes the last layer's output, which the draft does not read.
        streams[tuple(text)] = [found[layer][0] for layer in layers]
    differing, compared = 0, 0
    for known, drafts in seen:
        text = next((text for text in texts if text[: len(known)] == known), None)
        if text is None:
            continue  # The request of this row has ended.
        read = [one[: len(known) - 1] for one in streams[tuple(text)]]
        proposed = oracle.propose(read, torch.tensor(known), len(drafts))
        left = min(len(drafts), len(text) - len(known))  # Later tokens are never proposed.
        compared += left
        differing += sum(map(ne, drafts[:left], proposed[:left]))
    return differing, compared


class Oracle:
    """Compute a draft's proposals. `embedding` and `head` are the target's."""

    def __init__(
        self, config: dict[str, Any], tensors: Weights, *, embedding: Tensor, head: Tensor
    ) -> None:
        self.config, self.tensors = config, tensors
        self.embedding = tensors.get("embed_tokens.weight", embedding)
        self.head = tensors.get("lm_head.weight", head)
        ids = torch.arange(len(self.head))
        self.ids = ids + tensors.get("d2t", torch.zeros_like(ids))

    def propose(self, streams: Sequence[Tensor], tokens: Tensor, count: int) -> list[int]:
        """Return `count` tokens after `tokens` [n + 1], given `streams` [n, hidden]."""
        h, following, proposed = self.combine(streams), tokens[1:], []
        for _ in range(count):
            out, recurrent = self.run(h, self.embedding[following])
            proposed.append(int(self.ids[(out[-1] @ self.head.T).argmax()]))
            h = torch.cat([h, recurrent[-1:]])
            following = torch.cat([following, torch.tensor(proposed[-1:])])
        return proposed

    def combine(self, streams: Sequence[Tensor]) -> Tensor:
        if self.config.get("fc_norm"):
            streams = [self.norm(one, f"fc_norm.{i}") for i, one in enumerate(streams)]
        joined = torch.cat(list(streams), -1)
        if self.config.get("norm_before_fc"):
            joined = self.norm(joined, "input_norm")
        return joined @ self.tensors["fc.weight"].T

    def run(self, h: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        for layer in range(self.config["num_hidden_layers"]):
            own = "midlayer" if self.config["num_hidden_layers"] == 1 else f"midlayer.{layer}"
            if layer:
                x = self.norm(h, f"{own}.input_layernorm")
            else:
                normed = self.norm(h, f"{own}.hidden_norm")
                x = torch.cat([self.norm(e, f"{own}.input_layernorm"), normed], -1)
                h = normed if self.config.get("norm_before_residual") else h
            h = h + self.attention(x, f"{own}.self_attn")
            x = self.norm(h, f"{own}.post_attention_layernorm")
            gate, up = (self.linear(x, f"{own}.mlp.{part}_proj") for part in ("gate", "up"))
            h = h + self.linear(F.silu(gate) * up, f"{own}.mlp.down_proj")
        out = self.norm(h, "norm")
        return out, out if self.config.get("norm_output") else h

    def attention(self, x: Tensor, name: str) -> Tensor:
        dim, length = self.config["head_dim"], len(x)
        q, k, v = (
            self.linear(x, f"{name}.{part}_proj").view(length, -1, dim).transpose(0, 1)
            for part in "qkv"
        )
        theta = self.config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        angles = torch.arange(length)[:, None] * torch.cat([theta, theta])
        q, k = (y * angles.cos() + _half_turned(y) * angles.sin() for y in (q, k))
        k, v = (y.repeat_interleave(len(q) // len(k), 0) for y in (k, v))
        scores = q @ k.transpose(1, 2) / dim**0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        attended = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        return self.linear(attended.transpose(0, 1).flatten(1), f"{name}.o_proj")

    def linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.tensors.get(f"{name}.bias", torch.zeros(()))
        return x @ self.tensors[f"{name}.weight"].T + bias

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.tensors[f"{name}.weight"]


def _half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)
