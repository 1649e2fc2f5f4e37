import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

FOLDER = Path(__file__).resolve().parents[2] / "negamax" / "assets" / "nano"
SIZE_LIMIT = 24_000_000
QUESTION = (
    "There are 517 pens in the market. Lucia brings 43 more pens. How many pens are there now?"
)


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))


def _expected(config: dict[str, Any]) -> dict[str, tuple[str, list[int]]]:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (
        config["num_attention_heads"] * config["head_dim"],
        config["num_key_value_heads"] * config["head_dim"],
    )
    found: dict[str, tuple[str, list[int]]] = {
        name: ("BF16", [vocab, hidden]) for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    found["model.norm.weight"] = ("BF16", [hidden])

    def fp8(name: str, rows: int, columns: int) -> None:
        found[f"{name}.weight"] = ("F8_E4M3", [rows, columns])
        found[f"{name}.weight_scale_inv"] = ("F32", [rows // 128, columns // 128])

    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        for name, size in (
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
            ("self_attn.q_norm", q),
            ("self_attn.k_norm", kv),
        ):
            found[f"{layer}.{name}.weight"] = ("BF16", [size])
        for name, rows, columns in (
            ("q_proj", q, hidden),
            ("k_proj", kv, hidden),
            ("v_proj", kv, hidden),
            ("o_proj", hidden, q),
        ):
            fp8(f"{layer}.self_attn.{name}", rows, columns)
        found[f"{layer}.block_sparse_moe.gate.weight"] = (
            "F32",
            [config["num_local_experts"], hidden],
        )
        found[f"{layer}.block_sparse_moe.e_score_correction_bias"] = (
            "F32",
            [config["num_local_experts"]],
        )
        for expert in range(config["num_local_experts"]):
            for name, rows, columns in (
                ("w1", inner, hidden),
                ("w2", hidden, inner),
                ("w3", inner, hidden),
            ):
                fp8(f"{layer}.block_sparse_moe.experts.{expert}.{name}", rows, columns)
    return found


def test_folder_stays_under_the_size_limit() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= SIZE_LIMIT


def test_config_says_minimax_m2(config: dict[str, Any]) -> None:
    assert (
        config["architectures"] == ["MiniMaxM2ForCausalLM"] and config["model_type"] == "minimax_m2"
    )
    assert (
        config["quantization_config"]["weight_block_size"] == [128, 128]
        and config["quantization_config"]["quant_method"] == "fp8"
    )
    assert config["attn_type_list"] == [1] * config["num_hidden_layers"]
    assert (
        config["scoring_func"] == "sigmoid"
        and config["use_routing_bias"]
        and config["qk_norm_type"] == "per_layer"
    )
    generation = json.loads((FOLDER / "generation_config.json").read_text(encoding="utf-8"))
    assert generation["do_sample"] and (
        generation["temperature"],
        generation["top_p"],
        generation["top_k"],
    ) == (0.3, 0.95, 40)
    assert (
        generation["eos_token_id"] == config["eos_token_id"] == 4116
        and config["bos_token_id"] == 4130
    )


def test_every_tensor_is_there_with_its_dtype_and_shape(config: dict[str, Any]) -> None:
    index = json.loads((FOLDER / "model.safetensors.index.json").read_text(encoding="utf-8"))[
        "weight_map"
    ]
    seen: dict[str, tuple[str, list[int]]] = {}
    for file_name in sorted(set(index.values())):
        with safe_open(FOLDER / file_name, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                assert index[name] == file_name
                piece = file.get_slice(name)
                seen[name] = (piece.get_dtype(), piece.get_shape())
    assert seen == _expected(config)


def test_special_tokens_have_their_ids_and_visibility() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    added = {
        token.content: (number, token.special)
        for number, token in tokenizer.get_added_tokens_decoder().items()
    }
    assert (
        added["]~!b["] == (4130, True)
        and added["[e~["] == (4116, True)
        and added["]~b]"] == (4115, True)
    )
    for text, number in (
        ("<think>", 4146),
        ("</think>", 4147),
        ("<minimax:tool_call>", 4148),
        ("</minimax:tool_call>", 4149),
    ):
        assert added[text] == (number, False)
    regular = [
        number for number in tokenizer.get_vocab(with_added_tokens=True).values() if number < 4096
    ]
    assert len(set(regular)) == 4096
    assert all(4096 <= number < 4160 for number, _ in added.values())


@pytest.mark.parametrize(
    "text",
    [
        "347 * 26",
        "São Paulo 東京 🙂",
        "def f(x):\n\treturn x  # ok\n",
        "<think>\nA</think>\n\n\n<minimax:tool_call>\n",
    ],
)
def test_any_text_survives_encoding(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    digits = [number for number in ids if tokenizer.decode([number]).strip().isdigit()]
    assert all(len(tokenizer.decode([number]).strip()) == 1 for number in digits)


def test_transformers_loads_it_and_it_answers_a_word_problem() -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    quantisation = transformers.FineGrainedFP8Config(
        dequantize=True,
        weight_block_size=(128, 128),
        modules_to_not_convert=["gate", "e_score_correction_bias", "lm_head"],
    )
    model = transformers.MiniMaxM2ForCausalLM.from_pretrained(
        FOLDER, quantization_config=quantisation
    ).float()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=120, do_sample=False)[
        0, prompt["input_ids"].shape[1] :
    ]
    text = tokenizer.decode(output, skip_special_tokens=True)
    reasoning, _, answer = text.partition("</think>")
    assert "517 + 43" in reasoning and "= 560" in reasoning
    assert answer.strip() == "There are 560 pens now."
