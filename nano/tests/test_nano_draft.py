from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from nano import draft_model, draft_targets, draft_train, model, train
from negamax.config.json_file import read_json_object
from negamax.models.eagle3.config import read_spec
from tests.tiny_draft import Oracle

LAYERS = (2, 3, 5)


def make() -> tuple[Any, Any]:
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    net = model.NanoModel(
        model.NanoConfig(
            **sizes, vocab_size=64, rotary_dim=8, num_local_experts=4, intermediate_size=32
        )
    )
    with torch.no_grad():
        net.head.mul_(40)  # Enlarge the random logits so that the draft can learn from them.
    draft = draft_model.DraftModel(
        draft_model.DraftConfig(**sizes, intermediate_size=48, draft_vocab_size=40)
    )
    use = model.precision(torch.float32, weights=False, activations=False)
    return draft_targets.NanoTarget(net, torch.device("cpu"), layers=LAYERS, use=use), draft


def test_unrolled_steps_propose_the_tokens_of_the_written_draft(tmp_path: Path) -> None:
    target, draft = make()
    ids = torch.arange(64)[torch.arange(64) % 8 < 5]
    draft_train.write(
        draft, ids, tmp_path, layers=LAYERS, vocab_size=64, window=4096, target_type="minimax_m2"
    )
    config = read_json_object(tmp_path / "config.json")
    spec = read_spec(config | {"vocab_size": 4160, "hidden_size": 256, "target_hidden_size": 256})
    assert spec.aux_layers == LAYERS and spec.notes == ()
    assert spec.target_model_type == "minimax_m2"
    tensors = {name: one.float() if one.is_floating_point() else one
               for name, one in load_file(tmp_path / "model.safetensors").items()}  # fmt: skip
    for own in draft.parameters():
        own.data = own.data.bfloat16().float()  # as written
    oracle = Oracle(config, tensors, embedding=target.net.embed.detach(), head=target.head.detach())
    known = torch.randint(0, 64, (9,))
    row = len(known) - 2  # the last row that has a residual stream

    def states(tokens: torch.Tensor) -> Any:
        return target.run(tokens[None], torch.ones(len(tokens), len(tokens)).tril().bool())

    streams, _, _ = states(known)
    wanted = oracle.propose(streams[0, :-1].split(32, -1), known, draft_model.STEPS)
    tokens = torch.cat([known, torch.tensor(wanted)])
    streams, _, embeddings = states(tokens)
    mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    with torch.no_grad():
        steps = draft(streams, embeddings, torch.arange(len(tokens)), draft_model.attend_with(mask))
        found = [int(ids[draft.logits(out[0, row]).argmax()]) for out in steps]
    assert found == wanted
    assert len(set(wanted)) > 1


@pytest.mark.full
def test_weights_of_flex_attention_are_those_of_the_definition() -> None:
    """Compare with the block masks that are used for training on a GPU."""
    q, k, v = torch.randn(2, 4, 32, 16), torch.randn(2, 2, 32, 16), torch.randn(2, 2, 32, 16)

    def causal(_b: Any, _h: Any, q: Any, k: Any) -> Any:
        return q >= k

    mask = create_block_mask(causal, 2, None, 32, 32, device="cpu")
    asked = AuxRequest(lse=True)
    found, more = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_aux=asked)
    wanted = draft_model.attend_with(torch.ones(32, 32, dtype=torch.bool).tril())(q, k, v)
    torch.testing.assert_close((found, more.lse), wanted)


def test_training_steps_lower_the_loss() -> None:
    target, draft = make()
    ids = torch.arange(40)
    trainer = draft_train.Trainer(target, draft, ids, shape=(2, 48), rate=1e-2)
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randint(0, 64, (12,), generator=generator)
    tokens = pattern.repeat(8).view(2, 48)
    places = torch.arange(95)
    batch = train.Batch(
        tokens,
        (torch.arange(48).expand(2, 48) // 24).int(),
        places,
        torch.where(places % 24 < 23, tokens.flatten()[places + 1], -100),
    )
    results = torch.stack([trainer.step(batch, done=0.0) for _ in range(30)])
    assert results[-5:, 0].mean() < 0.7 * results[:3, 0].mean()
    assert results[-5:, 1].mean() > results[:3, 1].mean()


def test_vocabulary_is_the_most_frequent_tokens_of_the_assistant() -> None:
    tokens = np.array([5, 5, 5, 7, 7, 9, 11, 4100, 4101], dtype=np.int32)
    mask = np.array([1, 1, 1, 1, 1, 1, 0, 1, 0])
    chosen = draft_train.choose_vocabulary([{"tokens": tokens, "mask": mask}], 3, 4160)
    assert chosen.tolist() == [5, 7, 4100]  # A marker precedes more frequent tokens.
