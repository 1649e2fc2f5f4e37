"""Examples for the help of each command and for the command reference."""

EXAMPLES: dict[str, tuple[str, ...]] = {
    "serve": (
        "negamax serve nano",
        "negamax serve nano-m3",
        "negamax serve MiniMaxAI/MiniMax-M2.5 --tensor-parallel-size 4",
        "negamax serve ./checkpoint --host 0.0.0.0 --api-key-file keys.txt --max-model-len 128k",
        "negamax serve --config server.toml --explain",
    ),
    "chat": (
        "negamax chat nano",
        "negamax chat nano --system 'Answer in one word.' --temperature 0",
        "negamax chat --url http://127.0.0.1:8000",
    ),
    "generate": (
        "negamax generate nano 'What is 47 + 38?'",
        r"negamax generate nano --raw $']~b]user\nWhat is 47 + 38?[e~[\n]~b]ai\n<think>\n'",
        "negamax generate nano --json -n 4 < prompt.txt",
    ),
    "convert": (
        "negamax convert MiniMaxAI/MiniMax-M2 ./m2-int4 --to int4 --allow-lossy --verify",
        "negamax convert ./checkpoint ./bf16 --to bf16",
        "negamax convert MiniMaxAI/MiniMax-M2 ./m2-tp4 --tensor-parallel-size 4",
    ),
    "plan": (
        "negamax plan minimax-m2 --gpus 4 --gpu H200",
        "negamax plan MiniMaxAI/MiniMax-M3 --gpus 8 --gpu-memory 180 --max-model-len 256K",
        "negamax plan ./checkpoint --gpus 16 --nodes 2 --concurrency 1,512 --json",
    ),
    "doctor": ("negamax doctor", "negamax doctor --json --network"),
    "parse": (
        "negamax parse --format m2 < answer.txt",
        "negamax parse --format m3 --thinking-mode enabled --tools tools.json < answer.txt",
    ),
    "bench serve": (
        "negamax bench serve --port 8000 --num-prompts 64 --random-input-len 512 "
        "--random-output-len 128",
        "negamax bench serve --dataset-name agent --max-concurrency 1,4,16 --save-result --plot "
        "load.png",
    ),
    "bench offline": (
        "negamax bench offline nano --concurrency 1,8 --input-len 256 --output-len 64",
        "negamax bench offline minimax-m2 --load-format synthetic -tp 4 --json result.json",
    ),
    "bench kernels": (
        "negamax bench kernels",
        "negamax bench kernels --op norm.add_rms --json kernels.json",
    ),
    "bench profile": ("negamax bench profile nano --batch 1,16 --steps 5",),
    "bench accuracy": (
        "negamax bench accuracy",
        "negamax bench accuracy --suite nano-math --count 100",
        """negamax bench accuracy nano -sc '{"method": "eagle3", "model": "nano-draft"}'""",
    ),
    "bench compare": ("negamax bench compare before.json after.json",),
}


def make_epilog(command: str) -> str:
    """Return the end of a command's help: its examples, in Markdown."""
    return "\n".join(["Examples:", "", "```text", *EXAMPLES[command], "```"])
