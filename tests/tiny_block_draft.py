"""Make small random block drafts, and compute their proposals in plain PyTorch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

Weights = dict[str, Tensor]

_SIZES = json.loads("""{
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "torch_dtype": "float32"
}""")
# config fields, and whether the draft has its own embedding and head ("own")
VARIANTS: dict[str, dict[str, Any]] = json.loads("""{
    "dspark": {
        "architectures": ["DSparkMiniMaxDraftModel"], "dspark_block_size": 4, "rotary_dim": 4,
        "dspark_noise_token_id": 95, "dspark_markov_rank": 16, "rope_theta": 1e4,
        "dspark_ffn_hidden_size": 40, "swiglu_alpha": 1.7, "swiglu_limit": 2.0,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9,
        "enable_confidence_head": true, "own": false
    },
    "dspark, causal": {
        "architectures": ["Qwen3DSparkModel"], "block_size": 4, "mask_token_id": 90,
        "markov_rank": 8, "intermediate_size": 40, "hidden_act": "silu", "causal": true,
        "rope_theta": 1e4, "model_type": "qwen3", "own": true, "enable_confidence_head": true,
        "confidence_head_with_markov": false
    },
    "dflash": {
        "architectures": ["DFlashDraftModel"], "block_size": 5, "intermediate_size": 40,
        "hidden_act": "silu", "rope_theta": 1e4, "use_swa": true, "swa_window_size": 6,
        "dflash_config": {"mask_token_id": 91}, "model_type": "qwen3", "own": true
    }
}""")
VARIANTS["dspark, mxfp8"] = VARIANTS["dspark"] | {
    "quantization_config": {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
}


def config(variant: str, *, vocab_size: int, hidden_size: int, ids: list[int]) -> dict[str, Any]:
    own = {name: value for name, value in VARIANTS[variant].items() if name != "own"}
    if "dflash_config" in own:
        own["dflash_config"] = own["dflash_config"] | {"target_layer_ids": ids}
    else:
        prefix = "dspark_" if "dspark_block_size" in own else ""
        own[f"{prefix}target_layer_ids"] = ids
    return _SIZES | {"vocab_size": vocab_size, "hidden_size": hidden_size} | own


def weights(variant: str, config: dict[str, Any], seed: int) -> Weights:
    """Make random tensors under vLLM's names, with clearly separated logits."""
    oracle, generator = Oracle(config, {}), torch.Generator().manual_seed(seed)
    hidden, vocab_size, dim = config["hidden_size"], config["vocab_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm(size: int) -> Tensor:
        return (not oracle.is_gemma) + 0.3 * torch.randn(size, generator=generator)

    made = {"fc.weight": matrix(hidden, 3 * hidden)}
    made |= {f"{name}.weight": norm(hidden) for name in ("hidden_norm", "norm")}
    for layer in range(config["num_hidden_layers"]):
        own = f"layers.{layer}"
        for part, rows in {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}.items():
            made[f"{own}.self_attn.{part}_proj.weight"] = 2 * matrix(rows, hidden)
        made[f"{own}.self_attn.o_proj.weight"] = matrix(hidden, heads * dim)
        for part, shape in (("gate", (40, hidden)), ("up", (40, hidden)), ("down", (hidden, 40))):
            made[f"{own}.mlp.{part}_proj.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{own}.{name}.weight"] = norm(hidden)
        for name in ("q_norm", "k_norm"):
            made[f"{own}.self_attn.{name}.weight"] = norm(dim)
    if rank := oracle.markov_rank:
        made["markov_head.markov_w1.weight"] = torch.randn(vocab_size, rank, generator=generator)
        made["markov_head.markov_w2.weight"] = 2 * matrix(vocab_size, rank)
    if config.get("enable_confidence_head"):
        width = hidden + rank if config.get("confidence_head_with_markov", True) else hidden
        made["confidence_head.proj.weight"] = 2 * matrix(1, width)
        made["confidence_head.proj.bias"] = torch.tensor([0.3])
    if VARIANTS[variant]["own"]:
        made["embed_tokens.weight"] = torch.randn(vocab_size, hidden, generator=generator)
        made["lm_head.weight"] = 3 * matrix(vocab_size, hidden)
    return made


def quantize(tensors: Weights) -> Weights:
    """Return `tensors` with MXFP8 projections of layers, and round the originals in place."""
    stored = dict(tensors)
    for name, tensor in tensors.items():
        if "_proj." not in name or not name.startswith("layers."):
            continue
        rows, columns = tensor.shape
        groups = F.pad(tensor, (0, -columns % 32)).view(rows, -1, 32)
        exponents = (groups.abs().amax(-1) / 448).log2().ceil()
        scale = exponents.exp2()[..., None]
        values = (groups / scale).to(torch.float8_e4m3fn)
        tensor.copy_((values.float() * scale).flatten(1)[:, :columns])
        stored[name] = values.view(torch.uint8).flatten(1)[:, :columns].view(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = (exponents + 127).to(torch.uint8)
    return stored


def respell(tensors: Weights) -> Weights:
    """Return `tensors` under the names of MiniMax-M3.1's draft."""
    spelled = {}
    for name, tensor in tensors.items():
        name = name.replace("norm.weight", "final_norm.weight") if name == "norm.weight" else name
        first, _, rest = name.partition(".")
        if first == "layers":
            number, _, rest = rest.partition(".")
            name = f"layers.{number}.decoder_layer.{rest}"
        spelled[f"language_model.model.dspark.{name}"] = tensor
    return spelled


def join(model: Path, draft: Path, *, is_among: bool) -> None:
    """Move a draft into the folder of its model, or into the model's files if `is_among`."""
    if not is_among:
        draft.rename(model / "dspark")
        return
    own = json.loads((draft / "config.json").read_text())
    config = json.loads((model / "config.json").read_text())
    prefixed = {name for name in own if name.startswith("dspark_")}
    layers = ("num_hidden_layers", "layer_types", "sliding_window", "rms_norm_eps")
    heads = ("num_attention_heads", "num_key_value_heads", "head_dim", "rotary_dim", "rope_theta")
    sizes = (*layers, *heads, "swiglu_alpha", "swiglu_limit")
    config |= {name: own[name] for name in prefixed}
    config |= {f"dspark_{name}": own[name] for name in sizes}
    (model / "config.json").write_text(json.dumps(config))
    file = model / "model.safetensors"
    save_file(load_file(file) | load_file(draft / "model.safetensors"), file)


class Oracle:
    """Compute a draft's proposals. `embedding` and `head` are the target's, if the draft lacks
    them.
    """

    def __init__(
        self,
        config: dict[str, Any],
        tensors: Weights,
        *,
        embedding: Tensor | None = None,
        head: Tensor | None = None,
    ) -> None:
        self.config, self.tensors = config, tensors
        self.embedding = tensors.get("embed_tokens.weight", embedding)
        self.head = tensors.get("lm_head.weight", head)
        self.is_gemma = config["architectures"] == ["DSparkMiniMaxDraftModel"]
        flat = {name.removeprefix("dspark_"): value for name, value in config.items()}
        flat |= flat.get("dflash_config", {})
        self.markov_rank = flat.get("markov_rank", 0)
        self.block_size, self.is_causal = flat["block_size"], flat.get("causal", False)
        self.mask_token = flat.get("mask_token_id", flat.get("noise_token_id"))
        num_layers = config["num_hidden_layers"]
        slides = ["sliding_attention" if flat.get("use_swa") else "full_attention"] * num_layers
        window = flat.get("swa_window_size", flat.get("sliding_window"))
        types = flat.get("layer_types", slides)
        self.windows = [window if one == "sliding_attention" else 10**6 for one in types]

    def propose(self, streams: Sequence[Tensor], tokens: Tensor, count: int) -> list[int]:
        """Return `count` tokens after `tokens` [n + 1], given `streams` [n, hidden]."""
        assert self.embedding is not None and self.head is not None
        context = self.norm(self.linear(torch.cat(list(streams), -1), "fc"), "hidden_norm")
        rows = torch.full((self.block_size,), self.mask_token)
        rows[0] = tokens[-1]
        h = self.embedding[rows]
        for layer, window in enumerate(self.windows):
            own = f"layers.{layer}"
            x = self.norm(h, f"{own}.input_layernorm")
            h = h + self.attention(x, context, f"{own}.self_attn", window)
            x = self.norm(h, f"{own}.post_attention_layernorm")
            gate, up = (self.linear(x, f"{own}.mlp.{part}_proj") for part in ("gate", "up"))
            h = h + self.linear(self.activate(gate, up), f"{own}.mlp.down_proj")
        h = self.norm(h, "norm")
        logits = h @ self.head.T
        if not self.markov_rank:
            return logits[1 : count + 1].argmax(-1).tolist()
        proposed = [int(tokens[-1])]
        for row in logits[:count]:
            bias = self.linear(
                self.tensors["markov_head.markov_w1.weight"][proposed[-1]], "markov_head.markov_w2"
            )
            proposed.append(int((row + bias).argmax()))
        head = self.tensors.get("confidence_head.proj.weight")
        if head is not None:
            before = self.tensors["markov_head.markov_w1.weight"][proposed[: self.block_size]]
            read = torch.cat([h[: len(before)], before], -1)[:, : head.shape[1]]
            bias = self.tensors["confidence_head.proj.bias"]
            self.confidences = torch.sigmoid(read @ head[0] + bias).tolist()
        return proposed[1:]

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        if not self.is_gemma:
            return F.silu(gate) * up
        alpha, limit = self.config["swiglu_alpha"], self.config["swiglu_limit"]
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)

    def attention(self, x: Tensor, context: Tensor, name: str, window: int) -> Tensor:
        length, count = len(context), len(x)
        read = torch.cat([context, x])
        places = torch.arange(length + count)
        q = self.turn(self.heads(x, f"{name}.q_proj", f"{name}.q_norm"), places[length:])
        k = self.turn(self.heads(read, f"{name}.k_proj", f"{name}.k_norm"), places)
        v = self.heads(read, f"{name}.v_proj")
        k, v = (y.repeat_interleave(len(q) // len(k), 0) for y in (k, v))
        rows = places[length:, None]
        is_hidden = (places < length) & (places <= rows - window)
        if self.is_causal:
            is_hidden = is_hidden | (places > rows)
        scores = (q @ k.transpose(1, 2) / self.config["head_dim"] ** 0.5).masked_fill(
            is_hidden, -torch.inf
        )
        return self.linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), f"{name}.o_proj")

    def heads(self, x: Tensor, name: str, norm: str | None = None) -> Tensor:
        """Split x [n, hidden] into [heads, n, head_dim]."""
        x = self.linear(x, name).unflatten(1, (-1, self.config["head_dim"]))
        return (self.norm(x, norm) if norm else x).transpose(0, 1)

    def turn(self, x: Tensor, places: Tensor) -> Tensor:
        size = self.config.get("rotary_dim", self.config["head_dim"])
        theta = self.config["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        angles = places[:, None] * theta
        first, second, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * (self.tensors[f"{name}.weight"] + self.is_gemma)
