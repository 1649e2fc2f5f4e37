"""Launch lines from the guides of MiniMax, vLLM, SGLang, AMD and Ascend: each is understood, or
refused with what to type.
"""

from __future__ import annotations

import shlex

import pytest

from negamax.cli.main import main

M2_VLLM = (
    "--tool-call-parser minimax_m2 --reasoning-parser minimax_m2_append_think "
    "--enable-auto-tool-choice"
)
M2_SGLANG = (
    "--tool-call-parser minimax-m2 --reasoning-parser minimax-append-think --trust-remote-code"
)
M3_VLLM = (
    "--block-size 128 --tool-call-parser minimax_m3 --reasoning-parser minimax_m3 "
    "--enable-auto-tool-choice"
)
M3_SGLANG = "--tool-call-parser minimax-m3 --reasoning-parser minimax-m3 --trust-remote-code"
ASCEND = (
    "--served-model-name MiniMax-M2.7 --host 0.0.0.0 --port 8000 --trust-remote-code "
    "--quantization ascend"
    """ --additional-config '{"enable_cpu_binding":true}' --enable-expert-parallel"""
)
EAGLE = (
    """--speculative_config '{"enforce_eager": true, "method": "eagle3", "model": "/path/Eagle3/","""
    """ "num_speculative_tokens": 3}'"""
)

UNDERSTOOD = {
    "MiniMax's guide, vLLM, 4 GPUs": (
        f"MiniMaxAI/MiniMax-M2 --trust-remote-code --tensor-parallel-size 4 {M2_VLLM}",
        {
            "tensor-parallel-size": "4",
            "tool-call-parser": "minimax_m2",
            "reasoning-parser": "minimax_m2_append_think",
        },
    ),
    "MiniMax's first guide, 4 GPUs with experts": (
        "--model MiniMaxAI/MiniMax-M2 --trust-remote-code --enable-expert-parallel "
        "--tensor-parallel-size 4"
        " --enable-auto-tool-choice --tool-call-parser minimax_m2 --reasoning-parser minimax_m2",
        {
            "model": "MiniMaxAI/MiniMax-M2",
            "tensor-parallel-size": "4",
            "reasoning-parser": "minimax_m2",
        },
    ),
    "MiniMax's guide, an illegal memory access": (
        f"MiniMaxAI/MiniMax-M2.5 --tensor-parallel-size 4 {M2_VLLM}"
        """ --compilation-config "{\\"cudagraph_mode\\": \\"PIECEWISE\\"}\"""",
        {"tensor-parallel-size": "4", "enforce-eager": "off"},
    ),
    "vLLM's recipe, 2 B200": (
        f"MiniMaxAI/MiniMax-M2.5 --tensor-parallel-size 2 --gpu-memory-utilization 0.95 "
        f"--block-size 32 {M2_VLLM}",
        {"tensor-parallel-size": "2", "gpu-memory-utilization": "0.95", "block-size": "32"},
    ),
    "vLLM's recipe, M2.7 with a fused norm": (
        "MiniMaxAI/MiniMax-M2.7 --tensor-parallel-size 4 --tool-call-parser minimax_m2 "
        "--reasoning-parser minimax_m2"
        """ --compilation-config '{"mode":3,"pass_config":{"fuse_minimax_qk_norm":true}}' --enable-auto-tool-choice"""
        " --trust-remote-code",
        {"tensor-parallel-size": "4", "reasoning-parser": "minimax_m2"},
    ),
    "vLLM's recipe, Hopper": (
        f"MiniMaxAI/MiniMax-M2.5 -tp 4 {M2_VLLM} --max-num-seqs 512 --max-num-batched-tokens 32768"
        " --kv-cache-dtype fp8 --attention-backend FLASHINFER --moe-backend triton",
        {
            "tensor-parallel-size": "4",
            "max-num-seqs": "512",
            "max-num-batched-tokens": "32768",
            "kv-cache-dtype": "fp8",
        },
    ),
    "vLLM's recipe, AMD": (
        f"MiniMaxAI/MiniMax-M2 --tensor-parallel-size 4 {M2_VLLM} --trust-remote-code "
        f"--disable-log-requests --port 8007",
        {"tensor-parallel-size": "4", "port": "8007"},
    ),
    "vLLM's recipe, AMD, M2.5 on 2 GPUs": (
        f"MiniMaxAI/MiniMax-M2.5 --tensor-parallel-size 2 {M2_VLLM} --trust-remote-code",
        {"tensor-parallel-size": "2"},
    ),
    "vLLM's recipe, AMD, M3": (
        "/models/MiniMax-M3-MXFP8 --served-model-name minimax-m3 --port 8000 --trust-remote-code"
        f" --tensor-parallel-size 8 --attention-backend TRITON_ATTN --mm-encoder-attn-backend "
        f"ROCM_AITER_FA {M3_VLLM}"
        " --mm-encoder-tp-mode data --gpu-memory-utilization 0.9 --max-model-len 16384",
        {"served-model-name": "minimax-m3", "block-size": "128", "max-model-len": "16384"},
    ),
    "AMD's article, M3 in MXFP4": (
        f"amd/MiniMax-M3-MXFP4 --tensor-parallel-size 4 --moe-backend aiter --attention-backend "
        f"TRITON_ATTN {M3_VLLM}"
        " --language-model-only --no-enable-prefix-caching",
        {"tensor-parallel-size": "4", "enable-prefix-caching": "off"},
    ),
    "LMCache's recipe, M3": (
        "MiniMaxAI/MiniMax-M3 --tensor-parallel-size 8 --trust-remote-code --block-size 128"
        """ --kv-transfer-config '{"kv_connector":"LMCacheMPConnector", "kv_role":"kv_both"}'""",
        {"tensor-parallel-size": "8", "block-size": "128"},
    ),
    "SGLang's cookbook, M2.7 on 4 GPUs, on this machine": (
        f"--model-path MiniMaxAI/MiniMax-M2.7 --tp 4 {M2_SGLANG} --mem-fraction-static 0.85",
        {
            "model": "MiniMaxAI/MiniMax-M2.7",
            "tensor-parallel-size": "4",
            "gpu-memory-utilization": "0.85",
        },
    ),
    "SGLang's cookbook, AMD": (
        f"--model-path MiniMaxAI/MiniMax-M2.5 --tp 2 --ep 2 --attention-backend aiter {M2_SGLANG}",
        {"tensor-parallel-size": "2"},
    ),
    "a community line with underscores and dots": (
        "--model /models/MiniMax-M3-NVFP4 --port 8070 --tensor-parallel-size 2 --max-model-len "
        "36000"
        " --gpu-memory-utilization 0.95 --trust-remote-code --tokenizer-mode auto "
        "--served-model-name MiniMax-M3-NVFP4"
        " --compilation_config.cudagraph_mode FULL_DECODE_ONLY --enable_prefix_caching "
        "--enable-chunked-prefill"
        " --max_num_batched_tokens 17000 --dtype bfloat16 --max_num_seqs 2 "
        "--compilation_config.mode VLLM_COMPILE"
        f" {M3_VLLM}",
        {
            "max-num-batched-tokens": "17000",
            "max-num-seqs": "2",
            "enforce-eager": "off",
            "dtype": "bfloat16",
        },
    ),
    "a community line, SGLang, M3 with a draft model": (
        "--model-path /models/MiniMax-M3 --tp-size 4 --port 30000 --kv-cache-dtype fp8_e4m3"
        " --chunked-prefill-size 8192 --mem-fraction-static 0.9 --speculative-algorithm EAGLE3"
        " --speculative-draft-model-path /models/MiniMax-M3-EAGLE3-GQA --speculative-num-steps 3"
        " --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --page-size 128"
        " --cuda-graph-backend-prefill breakable --reasoning-parser auto --tool-call-parser auto"
        " --enable-metrics --enable-cache-report --max-running-requests 48 --watchdog-timeout 3600"
        " --disable-shared-experts-fusion --weight-loader-prefetch-checkpoints "
        "--skip-server-warmup",
        {"kv-cache-dtype": "fp8_e4m3", "max-num-seqs": "48", "engine-hang-timeout": "3600.0"},
    ),
    "a community line, vLLM, M2.7": (
        "MiniMaxAI/MiniMax-M2.7 --tensor-parallel-size 2 --pipeline-parallel-size 1"
        " --kv-cache-dtype fp8 --distributed-executor-backend mp --no-enable-log-requests"
        " --distributed-timeout-seconds 1800 --no-enable-prefix-caching --max-model-len -1"
        " --logprobs-mode raw_logprobs",
        {"tensor-parallel-size": "2", "enable-prefix-caching": "off", "max-model-len": "-"},
    ),
    "SGLang's M3 guide, a bounded queue": (
        f"--model MiniMaxAI/MiniMax-M3 --tp-size 4 {M3_SGLANG} --enable-cache-report "
        f"--max-queued-requests 64",
        {"max-queued-requests": "64", "tensor-parallel-size": "4"},
    ),
    "MiniMax's guide, vLLM, 8 GPUs": (
        f"MiniMaxAI/MiniMax-M2 --trust-remote-code --enable_expert_parallel "
        f"--tensor-parallel-size 8 {M2_VLLM}",
        {"tensor-parallel-size": "8", "enable-expert-parallel": "on"},
    ),
    "MiniMax's guide, SGLang, 8 GPUs, with a key": (
        f"--model-path MiniMaxAI/MiniMax-M2 --tp-size 8 --ep-size 8 {M2_SGLANG} --host 0.0.0.0 "
        f"--port 8000 --api-key k --mem-fraction-static 0.85",
        {"tensor-parallel-size": "8", "expert-parallel-size": "8"},
    ),
    "vLLM's recipe, data and expert parallel": (
        f"MiniMaxAI/MiniMax-M2.5 --data-parallel-size 8 --enable-expert-parallel {M2_VLLM}",
        {"data-parallel-size": "8", "enable-expert-parallel": "on", "tensor-parallel-size": "1"},
    ),
    "vLLM's recipe, M3 on 8 GPUs": (
        "MiniMaxAI/MiniMax-M3 --tensor-parallel-size 8 --enable-expert-parallel "
        "--mm-encoder-attn-backend FLASHINFER"
        f" --mm-processor-cache-type shm {M3_VLLM} --trust-remote-code",
        {"tensor-parallel-size": "8", "enable-expert-parallel": "on"},
    ),
    "SGLang's old switch": (
        "--model-path MiniMaxAI/MiniMax-M2 --tp 4 --enable-ep-moe",
        {"tensor-parallel-size": "4", "enable-expert-parallel": "on"},
    ),
}

NO_KEY = ("--api-key", "--allow-unauthenticated")
REFUSED = {
    "MiniMax's guide, SGLang, 4 GPUs": (
        f"--model-path MiniMaxAI/MiniMax-M2 --tp-size 4 {M2_SGLANG} --host 0.0.0.0 --port 8000 "
        f"--mem-fraction-static 0.85",
        NO_KEY,
    ),
    "MiniMax's guide, SGLang, 8 GPUs": (
        f"--model-path MiniMaxAI/MiniMax-M2 --tp-size 8 --ep-size 8 {M2_SGLANG} --host 0.0.0.0 "
        f"--port 8000"
        " --mem-fraction-static 0.85",
        NO_KEY,
    ),
    "vLLM Ascend's guide, A3": (
        f"/weights/MiniMax-M2.7-w8a8-QuaRot {ASCEND} --tensor-parallel-size 4 "
        f"--data-parallel-size 4 --max-num-seqs 48"
        """ --max-model-len 40690 --compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}'"""
        f" --max-num-batched-tokens 16384 --gpu-memory-utilization 0.85 {EAGLE}",
        NO_KEY,
    ),
    "vLLM Ascend's guide, A3, long contexts": (
        f"/weights/MiniMax-M2.7-w8a8-QuaRot {ASCEND} --tensor-parallel-size 8 "
        f"--data-parallel-size 1"
        " --decode-context-parallel-size 1 --prefill-context-parallel-size 2 "
        "--cp-kv-cache-interleave-size 128"
        f" --max-num-seqs 16 --max-model-len 138000 {EAGLE}",
        NO_KEY,
    ),
    "vLLM Ascend's guide, A2": (
        f"/weights/MiniMax-M2.7-w8a8-QuaRot {ASCEND} --tensor-parallel-size 8 --max-num-seqs 32 "
        f"--seed 1024 {M2_VLLM}"
        """ --compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY","cudagraph_capture_sizes":[4,16,320]}'"""
        " --enable-force-include-usage --model-loader-extra-config "
        '\'{"enable_multithread_load":true,"num_threads":16}\''
        f" {EAGLE}",
        NO_KEY,
    ),
}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_launch_lines_are_understood(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    line, expected = UNDERSTOOD[name]
    code = main(["serve", *shlex.split(line), "--explain"])
    out, err = capsys.readouterr()
    assert code == 0, err
    values = {row.split()[0]: row.split()[1] for row in out.splitlines()}
    assert {key: values[key] for key in expected} == expected
    assert all(note.startswith("note: ") for note in err.splitlines())


@pytest.mark.parametrize("name", REFUSED)
def test_launch_lines_are_refused_with_the_equal_setting(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line, words = REFUSED[name]
    code = main(["serve", *shlex.split(line), "--explain"])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    refusal = err.splitlines()[-1]
    assert refusal.startswith("negamax: error: ")
    for word in words:
        assert word in refusal


def test_what_the_refusals_say_starts(capsys: pytest.CaptureFixture[str]) -> None:
    """MiniMax's 8-GPU lines with what they are told to type."""
    for line in (
        f"MiniMaxAI/MiniMax-M2 --trust-remote-code --tensor-parallel-size 4 {M2_VLLM}",
        f"--model-path MiniMaxAI/MiniMax-M2 --tp-size 4 {M2_SGLANG} --host 0.0.0.0 --port 8000 "
        f"--api-key secret",
    ):
        assert main(["serve", *shlex.split(line), "--explain"]) == 0
    assert "secret" not in capsys.readouterr().out
