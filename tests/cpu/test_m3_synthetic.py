import torch
from model_support import PagedRun, build

from negamax.checkpoint.synthetic import fill_synthetic
from negamax.layers.moe import mixtures
from negamax.models.minimax_m3.config import MiniMaxM3Spec
from negamax.models.minimax_m3.init import SHARED_GAIN
from negamax.models.registry import read_spec

PATTERN = [0, 0] + [1] * 10
SPEC = read_spec(
    {
        "architectures": ["MiniMaxM3SparseForCausalLM"], "dtype": "float32", "vocab_size": 2048,
        "hidden_size": 256, "intermediate_size": 32, "dense_intermediate_size": 128,
        "shared_intermediate_size": 32, "num_hidden_layers": 12, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 32, "rotary_dim": 16, "num_local_experts": 64,
        "num_experts_per_tok": 2, "routed_scaling_factor": 2.0, "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0, "max_position_embeddings": 256, "moe_layer_freq": PATTERN,
        "sparse_attention_config": {
            "sparse_index_dim": 32, "sparse_num_index_heads": 1, "sparse_topk_blocks": 2,
            "sparse_block_size": 16, "sparse_attention_freq": PATTERN,
        },
    }
)  # fmt: skip


def test_magnitudes_are_those_of_a_trained_model() -> None:
    assert isinstance(SPEC, MiniMaxM3Spec)
    model = build(SPEC, loaded=False)
    slots = model.weight_slots()
    targets = {name: slot.target for name, slot in slots.items()}
    fill_synthetic(slots, SPEC, 0)
    for name, values in targets.items():
        if name.endswith("norm.weight"):
            assert values.abs().max() < 0.5 and values.mean().abs() < 0.1, name
        elif name.endswith(("w2.weight", "down_proj.weight", "o_proj.weight")):
            gain = 1 / SPEC.routed_scaling_factor if "w2" in name else SHARED_GAIN
            added = values.std() * values.shape[1] ** 0.5 * (2 * SPEC.num_layers) ** 0.5
            assert abs(added / gain - 1) < 0.1, name


def test_batches_reach_experts_uniformly() -> None:
    """Check that B tokens reach about 64 (1 - (1 - 2 / 64)^B) experts in every layer."""
    assert isinstance(SPEC, MiniMaxM3Spec)
    model = build(SPEC, loaded=False)
    fill_synthetic(model.weight_slots(), SPEC, 0)
    model.finish_loading()
    found = mixtures(model.layers)
    chosen = torch.full((len(found), 128, SPEC.experts_per_token), -1, dtype=torch.int32)
    for moe, ids in zip(found, chosen, strict=True):
        moe.observe(ids)
    run, generator = PagedRun(model, num_blocks=400), torch.Generator().manual_seed(1)
    counts: dict[int, list[torch.Tensor]] = {48: [], 32: []}

    def count(batch: int) -> None:
        distinct = [layer[:batch].unique().numel() for layer in chosen]
        counts[batch].append(torch.tensor(distinct).float())

    last = {}
    for number in range(32):
        prompt = torch.randint(SPEC.vocab_size, (48,), generator=generator).tolist()
        last[f"s{number}"] = run.step([(f"s{number}", prompt)])[f"s{number}"][-1]
        count(48)
    for _ in range(10):
        rows = []
        for name, logits in last.items():
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            rows.append((name, [int(drawn)]))
        last = {name: logits[-1] for name, logits in run.step(rows).items()}
        count(32)
    for batch, each in counts.items():
        by_layer = torch.stack(each).mean(0) / (64 * (1 - (1 - 2 / 64) ** batch))
        assert abs(by_layer.mean() - 1) < 0.04, (batch, by_layer)
        assert (by_layer - 1).abs().max() < 0.12, (batch, by_layer)
    run.capture = (SPEC.num_layers - 1,)
    run.step([("s0", [1]), ("s1", [2])])
    residual = run.captured[0].pow(2).mean().sqrt()
    assert 1.0 < residual < 1.3  # The residual of the embeddings alone is 1.
