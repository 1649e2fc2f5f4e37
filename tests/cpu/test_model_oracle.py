import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_support import PagedRun, build, checkpoint_tensors, random_weights, tiny_config
from safetensors.torch import load_file
from torch import Tensor
from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

from negamax import LLM, SamplingParams
from negamax.config.model_spec import ModelSpec
from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.registry import OPS
from negamax.layers.attention import KvCaches
from negamax.models.decoder import Decoder
from negamax.models.registry import read_spec
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout
from tests import tiny, tiny_m3

# The gate runs some of these random configurations.
SEEDS = [pytest.param(seed, marks=[pytest.mark.full] if seed % 4 else []) for seed in range(24)]


def oracle(config: dict[str, object], seed: int, *, router_bias: float) -> MiniMaxM2ForCausalLM:
    rotary = config["rotary_dim"] / config["head_dim"]  # type: ignore[operator]
    own = ("architectures", "model_type", "rope_theta")
    fields = {name: value for name, value in config.items() if name not in own}
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    fields["rope_parameters"] = rope | {"partial_rotary_factor": rotary}
    model = MiniMaxM2ForCausalLM(MiniMaxM2Config(**fields)).eval().float()
    model.set_experts_implementation("eager")  # The grouped GEMM of transformers refuses odd sizes.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            values = torch.randn(tensor.shape, generator=generator)
            if name.endswith("e_score_correction_bias"):
                tensor.copy_((torch.rand(tensor.shape, generator=generator) * 2 - 1) * router_bias)
            elif "norm" in name:
                tensor.copy_(1 + 0.3 * values)
            elif "inv_freq" not in name:
                tensor.copy_(values * tensor.shape[-1] ** -0.5)
    return model


def expected_logits(model: MiniMaxM2ForCausalLM, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def test_captured_streams_are_the_hidden_states_of_transformers(tmp_path: Path) -> None:
    config = tiny_config(1)
    expected_model = oracle(config, 1, router_bias=5.0)
    expected_model.save_pretrained(tmp_path)
    spec = read_spec(config)
    tokens = [token % spec.vocab_size for token in range(40, 70)]
    with torch.no_grad():
        states = expected_model.model(torch.tensor([tokens]), output_hidden_states=True)
    expected = states.hidden_states
    run = PagedRun(build(spec, load_file(tmp_path / "model.safetensors")), num_blocks=32)
    run.capture = (spec.num_layers, *range(spec.num_layers))
    got = []
    for chunk in (tokens[:20], tokens[20:29], tokens[29:]):
        run.step([("a", chunk)])
        got.append(run.captured)
    last, *entering = (torch.cat(parts) for parts in zip(*got, strict=True))
    for stream, wanted in zip(entering, expected, strict=False):
        torch.testing.assert_close(stream, wanted[0], atol=1e-4, rtol=0)
    # transformers' last hidden state is taken after the final norm.
    normed = expected_model.model.norm(last)
    torch.testing.assert_close(normed, expected[-1][0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_equal_transformers_in_chunked_prefill_and_decode(seed: int, tmp_path: Path) -> None:
    config = tiny_config(seed)
    rng = random.Random(seed)
    expected_model = oracle(config, seed, router_bias=rng.uniform(4.0, 10.0))
    expected_model.save_pretrained(tmp_path)
    spec = read_spec(config)
    model = build(spec, load_file(tmp_path / "model.safetensors"))
    prompts = {
        name: [rng.randrange(spec.vocab_size) for _ in range(rng.randint(20, 60))] for name in "ab"
    }
    run = PagedRun(model, num_blocks=32, block_size=rng.choice((4, 5, 16)))
    got: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    done = {"a": 0, "b": 0}
    while any(done[name] < len(prompts[name]) for name in prompts):
        chunks = []
        for name, tokens in prompts.items():
            left = len(tokens) - done[name]
            if left:  # A few chunks run first, then the last tokens run one by one.
                size = 1 if left <= 8 else min(left - 7, rng.randint(1, 30))
                chunks.append((name, tokens[done[name] : done[name] + size]))
                done[name] += size
        for name, logits in run.step(sorted(chunks, key=lambda chunk: len(chunk[1]) != 1)).items():
            got[name].append(logits)
    for name, tokens in prompts.items():
        expected = expected_logits(expected_model, tokens)
        torch.testing.assert_close(torch.cat(got[name]), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("seed", [3, pytest.param(11, marks=pytest.mark.full)])
def test_all_tokens_to_one_expert_and_none_to_the_others(seed: int) -> None:
    """Send every token to the same expert by a router bias above all scores; others stay idle."""
    config = tiny_config(seed, num_local_experts=8, num_experts_per_tok=1, num_hidden_layers=2)
    expected_model = oracle(config, seed, router_bias=0.0)
    spec = read_spec(config)
    bias = torch.zeros(8)
    bias[5] = 100.0
    with torch.no_grad():
        for layer in expected_model.model.layers:
            layer.mlp.e_score_correction_bias.copy_(bias)
    run = PagedRun(build(spec, checkpoint_tensors(expected_model)))
    tokens = list(range(23))
    expected = expected_logits(expected_model, tokens)
    got = torch.cat([run.step([("a", tokens[:22])])["a"], run.step([("a", tokens[22:])])["a"]])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_reference_kernels_alone_give_the_same_logits() -> None:
    spec = read_spec(tiny_config(5))
    weights = random_weights(spec, 5)
    references = dict.fromkeys(OPS, "reference")
    runs = [PagedRun(build(spec, weights, choices=choices)) for choices in ({}, references)]
    for chunk in ([4, 8, 15, 16, 23, 42], [7], [7]):
        chosen, defined = (run.step([("a", chunk)])["a"] for run in runs)
        torch.testing.assert_close(chosen, defined, atol=1e-5, rtol=1e-5)


NUM_TOKENS = 64
TOLERANCE = 1e-4


@pytest.mark.parametrize(
    "seed", [*range(7), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(7, 24))]
)
def test_engine_equals_transformers_on_a_random_model(seed: int, tmp_path: Path) -> None:
    model_sizes = tiny.random_sizes(seed)
    vocab_size = model_sizes["vocab_size"]
    model = tiny.make_model(seed, **model_sizes)
    generator = torch.Generator().manual_seed(1000 + seed)
    sizes = (1, 5, 23, 58)
    prompts = [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in sizes]
    limits = {"block_size": 8, "max_num_batched_tokens": 11, "max_num_seqs": 3, "num_threads": 1}
    counts = {"max_tokens": NUM_TOKENS, "logprobs": 5, "prompt_logprobs": 5}
    params = SamplingParams(temperature=0.0, ignore_eos=True, repetition_penalty=1.0, **counts)
    with LLM(str(tiny.save(model, tmp_path)), dtype="float32", **limits) as engine:
        generations = engine.generate(prompts, params)
    for prompt, generation in zip(prompts, generations, strict=True):
        completion = generation.outputs[0]
        answer = completion.token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0].float()
        # Each token is the oracle's greedy token after the text before it.
        assert answer == logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
        assert len(answer) == NUM_TOKENS
        logprobs = torch.log_softmax(logits, dim=-1)
        entries = (generation.prompt_logprobs or []) + (completion.logprobs or [])
        assert len(entries) == len(prompt) - 1 + NUM_TOKENS
        for position, entry in enumerate(entries):
            assert entry.token_id == (prompt + answer)[position + 1]
            assert abs(entry.logprob - float(logprobs[position, entry.token_id])) < TOLERANCE
            for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
                assert abs(logprob - float(logprobs[position, token_id])) < TOLERANCE


class Pipeline(Decoder):
    """Run all stages of a model in one process; each stage gets only the caches of its layers."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], num_stages: int) -> None:
        self.spec, self.stages = spec, []
        for rank in range(num_stages):
            layout = ParallelLayout(rank=rank, pp=num_stages)
            stage = build(spec, weights, context=replace(ParallelContext.single(), layout=layout))
            assert isinstance(stage, Decoder)
            self.stages.append(stage)

    def forward(
        self,
        token_ids: Tensor,
        metadata: AttentionMetadata,
        kv: Sequence[KvCaches],
        *,
        capture: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        x, residual = self.stages[0].embed(token_ids)
        first = 0
        for stage in self.stages:
            own = kv[first : first + len(stage.layers)]
            x, residual = stage.stage(x, residual, metadata, own)
            first += len(own)
        assert first == len(kv)
        assert not capture
        return self.stages[-1].last_norm(x, residual), []

    def logits(self, hidden: Tensor) -> Tensor:
        return self.stages[-1].logits(hidden)


M2 = tiny_config(5, num_hidden_layers=3, vocab_size=64)
# The last two of three stages have no layer with full attention.
M3 = tiny_m3.text_config(
    5, num_hidden_layers=3, vocab_size=64, mlp_layer_types=["dense", "sparse", "sparse"],
    layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
)  # fmt: skip


@pytest.mark.parametrize("config", [M2, M3], ids=["M2", "M3"])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_one_after_other_are_whole_model(config: dict[str, object], num_stages: int) -> None:
    spec = read_spec(config)
    weights = random_weights(spec, 7)
    whole = PagedRun(build(spec, weights))
    staged = PagedRun(Pipeline(spec, weights, num_stages))
    steps = [[("a", [3, 1, 4, 1, 5, 9])], [("a", [2]), ("b", [6, 5, 3])], [("a", [5]), ("b", [8])]]
    for step in steps:
        expected, got = whole.step(step), staged.step(step)
        assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_stages_together_hold_every_tensor_once() -> None:
    spec = read_spec(M2)
    held: list[str] = []
    for rank in range(2):
        context = replace(ParallelContext.single(), layout=ParallelLayout(rank=rank, pp=2))
        held += build(spec, loaded=False, context=context).weight_slots()
    assert sorted(held) == sorted(build(spec, loaded=False).weight_slots())
