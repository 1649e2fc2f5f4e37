from typing import Any

import pytest
import torch
from model_support import random_weights
from test_triton_model import SPEC, gpu_model, kernel_table, use_few_programs
from torch import Tensor
from triton_support import launches

from negamax.checkpoint.synthetic import fill_synthetic
from negamax.config.quantization import QuantizationSpec
from negamax.formats.platform import CPU
from negamax.kernels.registry import KernelTable, resolve
from negamax.layers.linear import ColumnParallel, ProjectionPart, stack_rows
from negamax.layers.weights import LayerSetup
from negamax.models.drafts import DraftModel
from negamax.models.eagle3.config import read_spec
from negamax.models.registry import find_draft_family
from negamax.options.speculation import SpeculationConfig
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout
from negamax.quantization.detect import detect
from negamax.quantization.scheme import WeightFormat
from negamax.worker import kv_cache
from negamax.worker.block_drafts import BlockProposer
from negamax.worker.config import WorkerConfig
from negamax.worker.eagle3 import Eagle3Proposer
from negamax.worker.proposer import DraftRows, TokenStates
from negamax.worker.request_state import RequestState
from tests import tiny_block_draft, tiny_draft
from tests.kernel_cases.attention import run_metadata

HERE = torch.device("cpu")
NUM_DRAFTS = 3
LENGTHS, COUNTS = [20, 7], [4, 2]  # tokens of two requests, and how many of these run
PASS = [  # ops of a draft pass with one token per row
    "_locate", "_plan_decode", "_embed_norms", "_split_k", "_head_norm_rope_write", "_decode",
    "_split_k", "_add_rms", "_split_k", "_swiglu", "_split_k", "_add_rms", "_split_k",
    "_tile_argmax", "_row_argmax", "_record_drafts",
]  # fmt: skip


def draft_spec(**fields: Any) -> Any:
    sizes = {"vocab_size": 64, "target_hidden_size": 128, "hidden_size": 128, "head_dim": 128}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    return read_spec(tiny_draft.config(**sizes | ids | fields, torch_dtype="bfloat16"))


def block_spec(variant: str, **fields: Any) -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 128, "ids": [0, 1, 2]}
    own = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "rotary_dim": 64}
    own |= {"dspark_noise_token_id": 63}
    config = tiny_block_draft.config(variant, **sizes) | own | {"torch_dtype": "bfloat16"} | fields
    if "dflash_config" in config:
        config["dflash_config"] |= {"mask_token_id": 63}
    family = find_draft_family(config)
    assert family is not None
    return family.read_spec(config)


def worker_config(draft: DraftModel) -> WorkerConfig:
    return WorkerConfig(
        spec=SPEC, eos_token_ids=(), folder=None, layout=ParallelLayout(), device="cpu",
        dtype="bfloat16", kv_cache_dtype="auto", max_model_len=64, max_num_seqs=2,
        max_num_batched_tokens=16, block_size=16, num_kv_blocks=8, kv_cache_memory=None,
        gpu_memory_utilization=0.9, cudagraph_size=2, num_threads=1, seed=0, show_progress=False,
        addresses=None, draft=draft,
        speculation=SpeculationConfig(method="eagle3", num_speculative_tokens=NUM_DRAFTS),
    )  # fmt: skip


class DraftRun:
    def __init__(self, kernels: KernelTable, **fields: Any) -> None:
        variant = fields.pop("variant", None)
        spec = block_spec(variant, **fields) if variant else draft_spec(**fields)
        draft = DraftModel(spec, None)
        config = worker_config(draft)
        proposer = BlockProposer if variant else Eagle3Proposer
        self.proposer = proposer(config, draft, kernels=kernels)
        target = gpu_model(random_weights(SPEC, 3), keep_quantized=False)
        self.proposer.load(target, ParallelContext.single(), HERE)
        self.proposer.use_caches(
            kv_cache.allocate(
                draft.spec.kv_caches(), 9, block_size=16, dtype=torch.bfloat16, ranks=1, device=HERE
            )
        )
        self.requests = RequestState(
            2, 64, max_blocks=4, eos_token_ids=(), device=HERE, num_draft_tokens=NUM_DRAFTS
        )
        generator = torch.Generator().manual_seed(1)
        self.requests.tokens.random_(0, 64, generator=generator)
        self.requests.block_tables.copy_(torch.arange(12).view(3, 4).clamp_max(8))
        self.residuals = torch.randn(3, 8, 128, generator=generator).bfloat16()

    def propose(self, num_tokens: int) -> Tensor:
        slots, ends = torch.tensor([0, 1]), torch.tensor([3, 5])
        tables = self.requests.block_tables
        metadata = run_metadata(tables, LENGTHS, COUNTS, max_run=NUM_DRAFTS + 1)
        metadata.positions.clamp_(min=0)
        states = TokenStates(metadata, list(self.residuals))
        lengths = torch.tensor(LENGTHS) + 1
        with torch.inference_mode():
            return self.proposer.propose(
                states, DraftRows(slots, lengths, ends), self.requests, num_tokens
            )


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"draft_vocab_size": 40}, marks=pytest.mark.full),
        {"draft_vocab_size": 48, "norm_output": True, "fc_norm": True},
        {"variant": "dspark", "sliding_window": 19},
        {"variant": "dflash"},
    ],
    ids=str,
)
def test_draft_is_same_on_gpu(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_programs(monkeypatch)
    expected = DraftRun(resolve(platform=CPU, dtype=torch.bfloat16), **fields)
    got = DraftRun(kernel_table(), **fields)
    for _ in range(2):
        assert torch.equal(got.propose(NUM_DRAFTS), expected.propose(NUM_DRAFTS))


def test_one_more_draft_token_takes_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_programs(monkeypatch)
    draft_run = DraftRun(kernel_table(), draft_vocab_size=40)
    draft_run.propose(1)  # This run allocates memory that later runs share.
    with launches(monkeypatch) as one:
        draft_run.propose(1)
    with launches(monkeypatch) as three:
        draft_run.propose(3)
    assert three == one + 2 * PASS


@pytest.mark.parametrize(
    "fields",
    [
        None,
        {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ],
    ids=str,
)
def test_stacked_rows_equal_those_of_their_layers(fields: dict[str, Any] | None) -> None:
    scheme = detect(QuantizationSpec(fields["quant_method"], fields)) if fields else None
    weights = WeightFormat(torch.bfloat16, HERE, scheme)
    setup = LayerSetup(ParallelContext.single(), weights, kernel_table())
    parts = []
    for layer in range(2):
        own = [ProjectionPart(f"{layer}.{name}.weight", 128, range(128)) for name in "qkv"]
        parts.append((ColumnParallel(own, 128, setup=setup), range(128, 384)))
        fill_synthetic({slot.name: slot for slot in parts[-1][0].slots}, draft_spec(), seed=layer)
    run = stack_rows(parts)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.inference_mode():
        for (layer, rows), found in zip(parts, run(x), strict=True):
            layer.finish_loading()
            assert torch.equal(found, layer(x)[:, rows.start :])
