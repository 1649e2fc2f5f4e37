import json
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from negamax.cli.main import main
from tests.e2e.conftest import serving

CONFIG = {"method": "ngram", "num_speculative_tokens": 2, "adaptive": False}
CONFIG |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}


def test_drafts_are_counted_by_label(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--speculative-config", json.dumps(CONFIG))
    file = tmp_path / "bench.json"
    with serving(*options, log_file=tmp_path / "log") as server, server.http() as http:
        benchmark = (
            f"bench serve --base-url {server.url} --num-prompts 4 --random-input-len 8 "
            f"--random-output-len 40 --ignore-eos --save-result --result-filename {file}"
        )
        assert main(benchmark.split()) == 0
        text = http.get("/metrics").text
        body = {"text": "one two", "sampling_params": {"max_new_tokens": 12, "ignore_eos": True}}
        meta = http.post("/generate", json=body).json()["meta_info"]
        info = http.get("/server_info").json()
    assert "SYNTHETIC ACCEPTANCE of 2.00 tokens per row" in (tmp_path / "log").read_text()
    samples = {
        (sample.name, sample.labels.get("position")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    counts = "vllm:spec_decode_num"
    drafts = samples[f"{counts}_drafts_total", None]
    assert drafts > 40
    assert samples[f"{counts}_draft_tokens_total", None] == pytest.approx(2 * drafts, abs=8)
    assert samples[f"{counts}_accepted_tokens_total", None] == pytest.approx(drafts, abs=8)
    position = f"{counts}_accepted_tokens_per_pos_total"
    # The labels are those of the counters that they are divided by.
    labels = {f'{position}{{engine="0",model_name="nano",position="{place}"}}' for place in (0, 1)}
    assert labels == {line.split()[0] for line in text.splitlines() if line.startswith(position)}
    assert samples[position, "0"] == pytest.approx(drafts, abs=8)
    assert samples[position, "1"] == 0
    assert samples["sglang:spec_accept_length", None] == pytest.approx(2.0, abs=0.1)
    assert samples["negamax:synthetic_acceptance_length", None] == 2.0
    assert (info["speculative_algorithm"], info["speculative_num_draft_tokens"]) == ("NGRAM", 3)
    assert info["synthetic_acceptance_length"] == 2.0
    assert info["avg_spec_accept_length"] == pytest.approx(2.0, abs=0.1)
    assert meta["spec_accept_token_num"] == pytest.approx(meta["spec_verify_ct"], abs=1)
    assert meta["spec_accept_length"] == pytest.approx(2.0, abs=0.2)
    assert meta["spec_accept_rate"] == pytest.approx(0.5, abs=0.1)
    found = json.loads(file.read_text())
    assert found["spec_decode_synthetic"] is True
    assert 0 < found["spec_decode_num_drafts"] <= drafts
    assert found["spec_decode_acceptance_length"] == pytest.approx(2.0, abs=0.1)
    assert "SYNTHETIC Acceptance of Drafts" in capsys.readouterr().out
