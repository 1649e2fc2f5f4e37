import json
from collections import Counter
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


def test_config_is_of_minimax_m2_in_a_small_folder(config: dict[str, Any]) -> None:
    expected = {
        "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2",
        "attn_type_list": [1] * config["num_hidden_layers"], "scoring_func": "sigmoid",
        "use_routing_bias": True, "qk_norm_type": "per_layer", "eos_token_id": 4116,
        "bos_token_id": 4130,
    }  # fmt: skip
    assert {name: config[name] for name in expected} == expected
    quantization = config["quantization_config"]
    assert (quantization["quant_method"], quantization["weight_block_size"]) == ("fp8", [128, 128])
    generation = json.loads((FOLDER / "generation_config.json").read_text(encoding="utf-8"))
    expected = {"do_sample": True, "temperature": 0.3, "top_p": 0.95, "top_k": 40}
    expected["eos_token_id"] = 4116
    assert {name: generation[name] for name in expected} == expected
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= SIZE_LIMIT


def test_tensors_are_in_the_files_of_the_index(config: dict[str, Any]) -> None:
    """Check dtypes and files; the engine checks names and shapes when it loads the tensors."""
    index = json.loads((FOLDER / "model.safetensors.index.json").read_text(encoding="utf-8"))
    dtypes = Counter[str]()
    for file_name in set(index["weight_map"].values()):
        with safe_open(FOLDER / file_name, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                assert index["weight_map"].pop(name) == file_name
                dtypes[file.get_slice(name).get_dtype()] += 1
    assert not index["weight_map"]
    num_matrices = config["num_hidden_layers"] * (4 + 3 * config["num_local_experts"])
    assert dtypes["F8_E4M3"] == num_matrices
    # Scales, routers and their biases have this dtype.
    assert dtypes["F32"] == num_matrices + 2 * config["num_hidden_layers"]
    assert dtypes["BF16"] == 3 + 4 * config["num_hidden_layers"]


def test_special_tokens_have_their_ids_and_visibility() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    added = {
        token.content: (number, token.special)
        for number, token in tokenizer.get_added_tokens_decoder().items()
    }
    special = {"]~!b[": 4130, "[e~[": 4116, "]~b]": 4115}
    plain = {"<think>": 4146, "</think>": 4147}
    plain |= {"<minimax:tool_call>": 4148, "</minimax:tool_call>": 4149}
    assert all(added[text] == (number, True) for text, number in special.items())
    assert all(added[text] == (number, False) for text, number in plain.items())
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    regular = [number for number in vocabulary.values() if number < 4096]
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
    quantization = transformers.FineGrainedFP8Config(
        dequantize=True,
        weight_block_size=(128, 128),
        modules_to_not_convert=["gate", "e_score_correction_bias", "lm_head"],
    )
    model = transformers.MiniMaxM2ForCausalLM.from_pretrained(
        FOLDER, quantization_config=quantization
    ).float()
    asked = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=120, do_sample=False)
    output = output[0, prompt["input_ids"].shape[1] :]
    text = tokenizer.decode(output, skip_special_tokens=True)
    reasoning, _, answer = text.partition("</think>")
    assert "517 + 43" in reasoning and "= 560" in reasoning
    assert answer.strip() == "There are 560 pens now."
