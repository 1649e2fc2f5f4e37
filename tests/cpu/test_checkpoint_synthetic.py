from collections.abc import Iterator

import pytest
import torch
from m2_checkpoints import SlotModel, tiny_spec
from model_support import PagedRun, build, tiny_config
from stored_kernels import dequantized

from negamax.checkpoint.synthetic import fill_synthetic
from negamax.config.model_spec import ModelSpec
from negamax.layers.moe import mixtures
from negamax.layers.weights import MatrixWeight, slots_by_name
from negamax.models.decoder import Decoder
from negamax.models.minimax_m2.init import ATTENTION_GAIN
from negamax.models.minimax_m3.config import MiniMaxM3Spec
from negamax.models.minimax_m3.init import SHARED_GAIN
from negamax.models.registry import import_init, read_spec
from negamax.quantization import online
from negamax.quantization.detect import detect
from negamax.quantization.scheme import WeightFormat
from tests.layouts import full

SPEC = tiny_spec(hidden_size=64, num_local_experts=16, num_hidden_layers=3)


def filled(*, seed: int = 0) -> dict[str, torch.Tensor]:
    model = SlotModel(SPEC)
    fill_synthetic(model.weight_slots(), SPEC, seed)
    assert all(slot.written for slot in model.weight_slots().values())
    return model.parameters


def test_the_seed_decides_and_magnitudes_are_those_of_a_trained_model() -> None:
    first, again, other = filled(), filled(), filled(seed=1)
    for name, tensor in first.items():
        assert torch.isfinite(tensor).all()
        assert torch.equal(tensor, again[name])
        assert not torch.equal(tensor, other[name])
    assert not torch.equal(
        first["model.layers.0.self_attn.q_proj.weight"],
        first["model.layers.1.self_attn.q_proj.weight"],
    )
    for name, tensor in filled().items():
        if name.endswith("norm.weight"):
            assert (tensor - 1).abs().max() < 0.5
        elif name.endswith("bias"):
            assert tensor.min() > 6.5 and tensor.max() < 7.5
        elif not name.endswith("embed_tokens.weight"):
            is_residual = name.endswith(("o_proj.weight", "w2.weight"))
            wanted = (tensor.shape[1] * (2 * SPEC.num_layers if is_residual else 1)) ** -0.5
            wanted *= ATTENTION_GAIN if name.endswith("o_proj.weight") else 1.0
            assert abs(tensor.std().item() / wanted - 1) < 0.1, name


@pytest.mark.parametrize("name", online.NAMES)
def test_weights_in_any_format_have_the_magnitude_of_plain_ones(name: str) -> None:
    scheme = detect(online.spec(name))
    assert scheme is not None
    weights = WeightFormat(torch.float32, torch.device("cpu"), scheme)
    module = "model.layers.0.self_attn.q_proj.weight"
    matrix = MatrixWeight((128, 256), weights.stored(module), weights=weights)
    slots = matrix.slots(module, (128, 256), region=(range(128), range(256)))
    fill_synthetic(slots_by_name(slots), SPEC, 0)
    found = dequantized(matrix.take())
    wanted = import_init(SPEC).draw(module, SPEC).std
    assert abs(found.std() / wanted - 1) < 0.15 and found.mean().abs() < 0.05 * wanted


def m2_spec(num_layers: int) -> ModelSpec:
    sizes = {
        "vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": num_layers,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "rotary_dim": 16,
        "intermediate_size": 16, "num_local_experts": 64, "num_experts_per_tok": 2,
    }  # fmt: skip
    return read_spec(tiny_config(0, **sizes))


def routed_model(spec: ModelSpec) -> tuple[Decoder, torch.Tensor]:
    """Return a synthetic model, and the ids of the experts that its routers select."""
    model = build(spec, loaded=False)
    fill_synthetic(model.weight_slots(), spec, 0)
    model.finish_loading()
    routed = mixtures(model.layers)
    chosen = torch.full((len(routed), 128, 2), -1, dtype=torch.int32)
    for moe, ids in zip(routed, chosen, strict=True):
        moe.observe(ids)
    return model, chosen


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread, since on a busy machine the threads of tiny GEMMs wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("family", "greedy", "num_layers", "num_prompts"),
    [
        ("m2", True, 3, 32),
        full("m2", False, 12, 64),
        full("m2", True, 12, 64),
        full("m3", False, 12, 32),
    ],
)
def test_batches_reach_experts_uniformly(
    family: str, greedy: bool, num_layers: int, num_prompts: int
) -> None:
    """Check that B tokens reach about 64 (1 - (1 - 2 / 64)^B) experts in every layer."""
    spec = m2_spec(num_layers) if family == "m2" else M3_SPEC
    model, chosen = routed_model(spec)
    run, generator = PagedRun(model, num_blocks=400), torch.Generator().manual_seed(1)
    found: dict[int, list[torch.Tensor]] = {}

    def count(kind: int, batch: int) -> None:
        numbers = [layer[:batch].unique().numel() for layer in chosen]
        found.setdefault(kind, []).append(torch.tensor(numbers).float())

    last = {}
    for number in range(num_prompts):
        prompt = torch.randint(spec.vocab_size, (48,), generator=generator).tolist()
        last[f"s{number}"] = run.step([(f"s{number}", prompt)])[f"s{number}"][-1]
        count(0, 48)
    for batch in (4, 16, num_prompts) if family == "m2" else (num_prompts,):
        for _ in range(12):
            rows = []
            for name in list(last)[:batch]:
                scores = last[name].softmax(-1)
                drawn = torch.multinomial(scores, 1, generator=generator)
                rows.append((name, [int(scores.argmax() if greedy else drawn)]))
            last |= {name: logits[-1] for name, logits in run.step(rows).items()}
            count(batch, batch)
    for kind, counts in found.items():
        expected = 64 * (1 - (1 - 2 / 64) ** (kind or 48))
        by_layer = torch.stack(counts).mean(0) / expected
        assert abs(by_layer.mean() - 1) < (0.03 if family == "m2" else 0.04), (kind, by_layer)
        assert (by_layer - 1).abs().max() < 0.12, (kind, by_layer)
    if family == "m3":
        run.capture = (spec.num_layers - 1,)
        run.step([("s0", [1]), ("s1", [2])])
        residual = run.captured[0].pow(2).mean().sqrt()
        assert 1.0 < residual < 1.3  # The residual of the embeddings alone is 1.


def test_routing_is_reported_for_the_tokens_of_the_last_forward() -> None:
    model, chosen = routed_model(m2_spec(2))
    run = PagedRun(model, num_blocks=20)
    run.step([("a", list(range(30)))])
    reported = chosen[:, :30]
    assert ((reported >= 0) & (reported < 64)).all() and (chosen[:, 30:] == -1).all()
    assert (reported[..., 0] != reported[..., 1]).all()
    for moe in mixtures(model.layers):
        moe.observe(None)
    before = chosen.clone()
    run.step([("a", [5])])
    assert torch.equal(chosen, before)


PATTERN = [0, 0] + [1] * 10
M3_SPEC = read_spec(
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


def test_magnitudes_of_m3_are_those_of_a_trained_model() -> None:
    assert isinstance(M3_SPEC, MiniMaxM3Spec)
    model = build(M3_SPEC, loaded=False)
    slots = model.weight_slots()
    targets = {name: slot.target for name, slot in slots.items()}
    fill_synthetic(slots, M3_SPEC, 0)
    for name, values in targets.items():
        if name.endswith("norm.weight"):
            assert values.abs().max() < 0.5 and values.mean().abs() < 0.1, name
        elif name.endswith(("w2.weight", "down_proj.weight", "o_proj.weight")):
            gain = 1 / M3_SPEC.routed_scaling_factor if "w2" in name else SHARED_GAIN
            added = values.std() * values.shape[1] ** 0.5 * (2 * M3_SPEC.num_layers) ** 0.5
            assert abs(added / gain - 1) < 0.1, name
