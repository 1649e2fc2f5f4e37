import pytest

from negamax.bench.drafts import NO_DRAFTS, DraftCounts

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 20.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 3.0e+02
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 60.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 150.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 18.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 72.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="m",position="1"} 1.7e+09
"""


def test_counts_of_all_engines_are_added_and_a_run_has_its_own() -> None:
    counts = DraftCounts.of_metrics(METRICS)
    assert counts == DraftCounts(120, 360, 180, (108, 72))
    assert counts.subtract(NO_DRAFTS) == counts
    assert counts.subtract(DraftCounts(100, 300, 150, (90,))) == DraftCounts(20, 60, 30, (18, 72))
    assert sum((counts, counts), NO_DRAFTS).drafts == 240


def test_summary_has_the_names_of_vllm() -> None:
    summary = DraftCounts.of_metrics(METRICS).summary()
    assert summary["spec_decode_acceptance_rate"] == 50.0
    assert summary["spec_decode_acceptance_length"] == 2.5
    assert summary["spec_decode_per_position_acceptance_rates"] == pytest.approx([0.9, 0.6])
    assert summary["spec_decode_synthetic"] is False
    synthetic = f'{METRICS}negamax:synthetic_acceptance_length{{model_name="m"}} 2.5\n'
    assert DraftCounts.of_metrics(synthetic).summary()["spec_decode_synthetic"] is True


@pytest.mark.parametrize("value", ["3.7e-05", "1E-7", "NaN", "+Inf", "-2.5", "3 1395066363000"])
def test_other_metrics_may_have_any_value(value: str) -> None:
    other = f'other_metric{{name="a b"}} {value}\n'
    assert DraftCounts.of_metrics(other + METRICS) == DraftCounts.of_metrics(METRICS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no metrics here\n",
        "<html><body>Not found</body></html>",
        "vllm:num_requests_running 3\n",
        "vllm:spec_decode_num_drafts NaN\n",
        "vllm:spec_decode_num_accepted_tokens_per_pos 3\n",
        'vllm:spec_decode_num_accepted_tokens_per_pos{position="x"} 3\n',
    ],
)
def test_servers_without_drafts_have_none(text: str) -> None:
    assert DraftCounts.of_metrics(text).summary() == {}
