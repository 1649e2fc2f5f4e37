import dataclasses
import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from nano import m3_data, m3_export, m3_model, m3_train, model
from nano.suites import common
from negamax import LLM, SamplingParams

USE = model.precision(torch.float32, weights=False, activations=False)


def _layout(documents: torch.Tensor, choice: int) -> object:
    """Return a layout in which documents of at most `choice` tokens have full attention."""
    sizes = torch.stack([torch.bincount(row, minlength=9)[row] for row in documents])
    windows = torch.full((len(documents),), 10**6, dtype=torch.int32)
    return m3_model.Layout(documents.int(), sizes <= choice, windows)


def test_engine_continues_as_the_training_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = dataclasses.replace(
        m3_model.M3Config(), hidden_size=64, num_attention_heads=4, head_dim=32, rotary_dim=16,
        dense_intermediate_size=96, intermediate_size=32, index_dim=32, block_size=16,
        topk_blocks=2, max_position_embeddings=256,
    )  # fmt: skip
    net = m3_model.M3Model(config)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "norm" in name:
                parameter.normal_(0, 0.3)
            elif name.endswith(("w1", "w3")):
                parameter *= 4  # At this size activations reach their limit.
        for layer in net.layers:
            layer.expert_bias.normal_(0, 0.3)
        net.head.normal_(0, 0.3)
    m3_export.write(net.state_dict(), tmp_path, config, fp8=False)
    prompt = torch.randint(4000, (1, 150))
    with LLM(str(tmp_path), dtype="float32") as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=0)
        (made,) = llm.generate([prompt[0].tolist()], sampling)
    tokens = made.outputs[0].token_ids
    whole = torch.cat((prompt, torch.tensor([tokens])), 1)[:, :-1]
    whole = torch.nn.functional.pad(whole, (0, 160 - whole.shape[1]))
    layout = _layout(torch.zeros_like(whole), 32)
    scores = {}
    for mode in ("index", "all"):
        attend = m3_train.PackedAttention(config, layout, m3_model.Chooser(config, mode), None)
        with torch.no_grad():
            hidden, _ = net(whole, attend, dtype=torch.float32, use=USE)
            logits = net.logits(hidden[0, 149:159])
        scores[mode] = torch.log_softmax(logits, -1)
    assert scores["index"].argmax(-1).tolist() == tokens
    found = [at.logprob for at in made.outputs[0].logprobs]
    assert found == pytest.approx(scores["index"].max(-1).values.tolist(), abs=1e-4)
    # Attention to all blocks gives other numbers, so that the selection matters.
    assert found != pytest.approx(scores["all"].max(-1).values.tolist(), abs=1e-2)


def test_block_masks_show_the_selected_blocks_of_a_document() -> None:
    config = dataclasses.replace(
        m3_model.M3Config(), num_attention_heads=4, head_dim=16, index_dim=16, block_size=16,
        topk_blocks=2,
    )  # fmt: skip
    size = 192
    documents = torch.zeros(2, size, dtype=torch.int64)
    documents[0, 150:] = 1  # A long document precedes a short one that starts inside a block.
    documents[1, 20:] = 1
    documents[1, 32:] = 2
    layout = dataclasses.replace(
        _layout(documents, 42), window=torch.tensor([40, 10**6], dtype=torch.int32)
    )
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    heads = m3_model.Heads(
        draw(2, 4, size, 16), draw(2, 2, size, 16), draw(2, 2, size, 16),
        draw(2, 2, size, 16), draw(2, size, 16),
    )  # fmt: skip
    chooser = m3_model.Chooser(config, "index")
    explicit = m3_train.PackedAttention(config, layout, chooser, None)
    tiled = m3_train.PackedAttention(config, layout, chooser, SimpleNamespace())
    chosen = chooser.choose(heads, layout)
    pairs = (
        (explicit.dense, tiled.dense),
        (explicit.full, tiled.full),
        (explicit._chosen_mask(chosen), tiled._chosen_mask(chosen)),
    )
    for wanted, made in pairs:
        wanted = wanted.repeat_interleave(4 // wanted.shape[1], 1)
        asked = create_mask(made.mask_mod, 2, 4, size, size, device="cpu")
        tiles = made.to_dense().bool().repeat_interleave(16, -1).repeat_interleave(16, -2)
        assert torch.equal(asked & tiles.expand_as(asked), wanted)
    # Each token of a long document attends to two blocks, one of which is its own.
    assert chosen[0, :, ~layout.is_short[0]].sum(-1).max() == 2
    assert chosen[0, :, torch.arange(150), torch.arange(150) // 16].all()


def test_trained_tokens_follow_the_prompt_of_their_thinking_mode() -> None:
    rng, renderer = random.Random(3), m3_data.Renderer()
    modes, longest = set(), 0
    for _ in range(150):
        chat, mode = m3_data.draw(rng)
        tokens, mask = renderer.encode(chat, mode)
        longest = max(longest, len(tokens))
        modes.add(mode)
        last = chat.messages[-1]
        if last["role"] != "assistant" or not last["trained"]:
            continue
        before = dataclasses.replace(chat, messages=chat.messages[:-1])
        prompt = renderer.text(before, mode, prompt=True)
        ids = renderer.tokenizer.encode(prompt, add_special_tokens=False).ids
        assert tokens[: len(ids)].tolist() == ids
        assert not mask[len(ids) - 1] and mask[len(ids) :].all()
        if mode == "disabled":
            assert "ones " not in str(last)
    assert modes == {None, "adaptive", "enabled", "disabled"}
    assert longest > 4096


def test_turns_are_rendered_as_by_the_published_template() -> None:
    template, compared = m3_data.Renderer().template, 0
    golden = Path(__file__).parents[1] / "golden" / "minimax_m3_renders.jsonl"
    for line in golden.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        if case["expected"] is None or "pictures" in case["name"]:
            continue
        given = {"messages": case["messages"], "tools": case["tools"], **case["kwargs"]}
        made = template.render(**given, add_generation_prompt=False)
        # nano adds its own system and developer messages before the turns.
        turns, expected = (
            text.partition("]~b]developer\n")[2].partition("[e~[\n")[2]
            for text in (made, case["expected"])
        )
        assert turns == expected, case["name"]
        prompt = template.render(**given, add_generation_prompt=True)
        assert prompt == made + case["opening"], case["name"]
        compared += 1
    assert compared > 80


def test_packing_starts_long_documents_at_blocks_and_samples_late_queries() -> None:
    config = m3_model.M3Config()
    lengths = np.array([700, 130, 600, 40, 513, 300], dtype=np.int32)
    shard = {
        "tokens": np.arange(lengths.sum()) % 4000,
        "mask": np.arange(lengths.sum()) % 7 == 3,
        "lengths": lengths,
    }
    placed, left = m3_train.pack(lengths, 2, 1536, config)
    assert sorted(index for row in placed for index, _ in row) + left == [0, 1, 2, 3, 4, 5]
    assert all(at % 128 == 0 for row in placed for index, at in row if lengths[index] > 512)
    arrays = m3_train.assemble(
        placed, shard, row_tokens=1536, capacity=600, config=config,
        random=np.random.default_rng(0),
    )  # fmt: skip
    for row, members in enumerate(placed):
        for number, (_index, at) in enumerate(members):
            assert arrays["documents"][row, at] == number
        taught = arrays["sample"][row][arrays["weight"][row] > 0]
        assert not arrays["is_short"][row, taught].any()
        starts = dict(enumerate(at for _, at in members))
        offsets = [at - starts[arrays["documents"][row, at]] for at in taught.tolist()]
        assert offsets and min(offsets) >= 512
    seen = arrays["tokens"].reshape(-1)[arrays["inputs"] + 1]
    assert (seen == arrays["targets"])[arrays["targets"] >= 0].all()


def test_training_asks_nothing_that_is_held_out() -> None:
    rng, asked = random.Random(0), 0
    for _ in range(40):
        for message in m3_data.draw_long(rng).messages:
            thought = message.get("reasoning_content") or ""
            if thought.startswith("The text says: "):
                line = thought.removeprefix("The text says: ").removesuffix(".")
                asked += 1
                assert not common.is_held_out(f"nano-retrieval\n{line}")
    assert asked > 100
