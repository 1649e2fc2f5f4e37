import json
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest

from negamax.base.errors import CheckpointError, ConfigError
from negamax.config.generation import GenerationDefaults, SamplingDefaults, read_generation_defaults
from negamax.config.json_file import read_json_object
from negamax.config.model_spec import ModelSpec
from negamax.models.minimax_m2.config import FAMILY
from negamax.models.registry import bundled_spec


def defaults(folder: Path, config: Any = None, spec: ModelSpec | None = None) -> GenerationDefaults:
    if config is not None:
        (folder / "generation_config.json").write_text(json.dumps(config))
    spec = spec or bundled_spec("minimax-m2")
    return read_generation_defaults(folder, spec, absent=FAMILY.sampling)


def test_generation_defaults_of_minimax(tmp_path: Path) -> None:
    sampling = {"temperature": 1.0, "top_p": 0.95, "top_k": 40}
    minimax = GenerationDefaults(sampling=SamplingDefaults(**sampling), eos_token_ids=(200020,))
    assert defaults(tmp_path) == minimax
    ids = {"bos_token_id": 200019, "eos_token_id": 200020}
    assert defaults(tmp_path, {**ids, "do_sample": True, **sampling}) == minimax


def test_the_tokenizers_end_replaces_one_of_config_json_alone(tmp_path: Path) -> None:
    spec = replace(bundled_spec("minimax-m2"), eos_token_ids=(2,))  # of NVIDIA's NVFP4

    def ends() -> tuple[int, ...]:
        return defaults(tmp_path, spec=spec).eos_token_ids

    def write_config(eos_token: Any) -> None:
        added = {"200019": {"content": "]~b]"}, "200020": {"content": "[e~["}}
        config = {"eos_token": eos_token, "added_tokens_decoder": added}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    assert ends() == (2,)
    for name in ("[e~[", {"content": "[e~["}):
        write_config(name)
        assert ends() == (200_020,)
    for generation, expected in (("{}", 200_020), ('{"eos_token_id": 200019}', 200_019)):
        (tmp_path / "generation_config.json").write_text(generation)
        assert ends() == (expected,)
    (tmp_path / "generation_config.json").unlink()
    write_config("</s>")
    assert ends() == (2,)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"eos_token_id": [3, 4]}, SamplingDefaults(temperature=1.0, top_p=1.0, top_k=0)),
        ({"do_sample": False, "temperature": 0.7}, SamplingDefaults(temperature=0.0)),
        (
            {"top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1},
            SamplingDefaults(top_k=0, min_p=0.1, repetition_penalty=1.1),
        ),
    ],
)
def test_a_generation_config_replaces_all_defaults(
    tmp_path: Path, config: dict[str, Any], expected: SamplingDefaults
) -> None:
    found = defaults(tmp_path, config)
    assert found.sampling == expected
    assert found.eos_token_ids == tuple(config.get("eos_token_id", (200_020,)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-1, "hot", nan)),
        *(("top_p", value) for value in (0, 1.5)),
        *(("top_k", value) for value in (2.5, -2)),
        *(("min_p", 2), ("repetition_penalty", 0), ("do_sample", "yes")),
        *(("eos_token_id", value) for value in ("x", 200064)),
    ],
)
def test_refuses_bad_generation_values_by_name(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {field} is "):
        defaults(tmp_path, {field: value})


@pytest.mark.parametrize(
    "content", [None, b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'"text"']
)
def test_refuses_files_without_a_json_object_by_path(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    words = r"config\.json is missing" if content is None else r"config\.json"
    with pytest.raises(CheckpointError, match=words):
        read_json_object(path)
