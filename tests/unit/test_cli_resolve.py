import json
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from negamax.base.errors import ConfigError
from negamax.cli.examples import EXAMPLES
from negamax.cli.launchers import first_host
from negamax.cli.main import app, main
from negamax.cli.resolve import find_command, options_of, resolve
from negamax.config.embedded import EMBEDDED
from negamax.options.flags import Kind
from negamax.options.foreign import BENCH, SERVER, foreign_options
from tests.tables import read_table

CASES = tomllib.loads(Path(__file__).with_name("launch_lines.toml").read_text(encoding="utf-8"))
GROUP: Any = typer.main.get_command(app)


@pytest.fixture
def explained(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `negamax serve ... --explain`; return value and source by option, and the notes."""

    def run(line: str, *more: str) -> tuple[dict[str, tuple[str, str]], str]:
        code = main(["serve", *shlex.split(line), *more, "--explain"])
        out, err = capsys.readouterr()
        assert code == 0, err
        rows = [row.split("  ") for row in out.splitlines()]
        cells = [[cell.strip() for cell in row if cell] for row in rows]
        return {row[0]: (row[1], row[2]) for row in cells}, err

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(line: str) -> str:
        code = main(shlex.split(line))
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        *notes, message = err.splitlines()
        assert all(note.startswith("note: ") for note in notes)
        return str(message.removeprefix("negamax: error: "))

    return run


def test_precedence(explained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "server.toml"
    file.write_text(
        'model = "nano"\nmax-num-seqs = 5\nblock_size = 32\nport = 1\nenforce-eager = true\n'
    )
    monkeypatch.setenv("NEGAMAX_MAX_NUM_SEQS", "6")
    monkeypatch.setenv("NEGAMAX_PORT", "2")
    values, _ = explained(f"--config {file} --port 3")
    assert values["port"] == ("3", "--port")
    assert values["max-num-seqs"] == ("6", "NEGAMAX_MAX_NUM_SEQS")
    assert values["block-size"] == ("32", f"block_size in {file}")
    assert values["model"] == ("nano", f"model in {file}")
    assert values["seed"] == ("0", "default")
    assert values["enforce-eager"][0] == "on"
    monkeypatch.setenv("NEGAMAX_ENFORCE_EAGER", "0")
    assert explained(f"--config {file}")[0]["enforce-eager"] == ("off", "NEGAMAX_ENFORCE_EAGER")
    monkeypatch.setenv("NEGAMAX_CONFIG", str(file))
    values, _ = explained("nano-m3 --no-enforce-eager")
    assert values["model"] == ("nano-m3", "MODEL")
    assert values["enforce-eager"] == ("off", "--no-enforce-eager")
    assert values["block-size"][0] == "32"


def test_the_file_takes_lists_tables_and_foreign_names(explained: Any, tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(
        'served-model-name = ["a", "b"]\nmax-running-requests = 7\nenable-prefix-caching = '
        "false\ntrust-remote-code = true\n"
        "compilation-config = {cudagraph_capture_sizes = [1, "
        '4]}\n\n[default-chat-template-kwargs]\nthinking_mode = "enabled"\n'
        '[speculative-config]\nmethod = "ngram"\nadaptive = false\n'
    )
    values, notes = explained(f"nano --config {file}")
    assert values["speculative-config"][0] == '{"method": "ngram", "adaptive": false}'
    assert values["served-model-name"][0] == "a, b"
    assert values["max-num-seqs"] == ("7", f"max-running-requests in {file}")
    assert values["enable-prefix-caching"][0] == "off"
    assert values["max-cudagraph-capture-size"] == ("4", f"compilation-config in {file}")
    assert values["default-chat-template-kwargs"][0] == '{"thinking_mode": "enabled"}'
    reason = "code in a checkpoint is never run"
    assert notes == f"note: trust-remote-code in {file} has no effect: {reason}\n"


@pytest.mark.parametrize(("text", "words"), read_table("cli_resolve.refuses_a_bad_file"))
def test_refuses_a_bad_file(refused: Any, tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "server.toml"
    if text is not None:
        file.write_text(text)
    assert words in refused(f"serve nano --config {file}")


def test_ignores_kubernetes_services(explained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    address = "tcp://10.0.0.11:8000"
    for name in ("PORT", "PORT_8000_TCP"):
        monkeypatch.setenv(f"NEGAMAX_{name}", address)
    monkeypatch.setenv("NEGAMAX_SERVICE_HOST", "10.0.0.11")
    monkeypatch.setenv("NEGAMAX_SERVICE_PORT", "8000")
    shown, notes = explained("nano")
    assert notes == "" and "tcp://" not in str(shown)


def test_wrong_variables(refused: Any, explained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEGAMAX_MAX_NUM_SEQ", "3")
    notes = explained("nano")[1]
    words = "NEGAMAX_MAX_NUM_SEQ has no effect (did you mean NEGAMAX_MAX_NUM_SEQS?)"
    assert notes == f"note: the environment variable {words}\n"
    monkeypatch.delenv("NEGAMAX_MAX_NUM_SEQ")
    monkeypatch.setenv("NEGAMAX_BLOCK_SIZE", "many")
    assert refused("serve nano").startswith("NEGAMAX_BLOCK_SIZE is 'many': ")
    monkeypatch.setenv("NEGAMAX_BLOCK_SIZE", "16")
    monkeypatch.setenv("NEGAMAX_ENFORCE_EAGER", "perhaps")
    assert refused("serve nano").startswith("NEGAMAX_ENFORCE_EAGER is 'perhaps'; allowed: 1, true")


def test_every_option_of_every_command_has_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {Kind.SWITCH: "1", Kind.LIST: "x,y", Kind.JSON: "{}", Kind.VALUE: "7"}
    for name in ("serve", "chat", "generate", "parse", "doctor"):
        options = options_of(GROUP.commands[name])
        variables = [option.variable for option in options]
        assert len(set(variables)) == len(options)
        for option in options:
            if option.key not in ("config", "explain"):
                with monkeypatch.context() as context:
                    context.setenv(option.variable, values[option.kind])
                    choice = resolve(GROUP, [name]).choices[option.name]
                assert choice.source == option.variable
                assert choice.words or option.turns_off


def test_last_of_several_values_may_be_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["serve", "--served-model-name", "a", "b"]
    assert resolve(GROUP, words).words == ["serve", "--served-model-name=a", "b"]
    monkeypatch.setenv("NEGAMAX_MODEL", "nano")
    names = ["--served-model-name=a", "--served-model-name=b"]
    assert resolve(GROUP, words).words == ["serve", "--model=nano", *names]


def test_secrets_are_not_shown_and_keys_add_up(
    refused: Any, explained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("--hf-token", "--ssl-keyfile-password"):
        assert "hunter2" not in refused(f"serve nano {name} hunter2")
    monkeypatch.setenv("NEGAMAX_API_KEY", "first, second")
    values, _ = explained("nano --api-key third")
    assert values["api-key"] == ("(not shown)", "NEGAMAX_API_KEY, --api-key")
    chosen = resolve(GROUP, ["serve", "nano", "--api-key", "third"]).choices["api_keys"]
    assert chosen.words == ("--api-key=first", "--api-key=second", "--api-key=third")


@pytest.mark.parametrize(("line", "option", "value"), CASES["foreign_values"])
def test_foreign_values_and_names(explained: Any, line: str, option: str, value: str) -> None:
    values, names = explained(line)[0], option.split()
    assert " ".join(values[name][0] for name in names) == value


@pytest.mark.parametrize(("line", "words"), CASES["refusals"])
def test_refusals(refused: Any, line: str, words: str) -> None:
    assert words in refused(f"serve nano {line}")


@pytest.mark.parametrize(("line", "words"), CASES["refusals_before_a_run"])
def test_refusals_before_a_run(refused: Any, line: str, words: str) -> None:
    assert words in refused(line)


def test_options_without_effect_are_noted_once_per_reason(explained: Any) -> None:
    backends = "--attention-backend FLASHINFER --moe-backend triton"
    exchange = "--all2all-backend deepep_low_latency"
    _, notes = explained(f"nano {backends} --speculative-eagle-topk 1 --no-enable-lora {exchange}")
    _, hints = explained(
        "nano --enable-chunked-prefill=False --hf-overrides '{\"use_index_cache\":true}'"
    )
    assert "always computed in chunks; --max" in hints and "json have no effect" in hints
    assert notes.splitlines() == [
        "note: --attention-backend, --moe-backend have no effect: kernels are chosen at start, "
        "for the GPU and the model",
        "note: --speculative-eagle-topk has no effect: drafts are chains of tokens "
        "that a step verifies; the option does not change answers",
        "note: --all2all-backend deepep_low_latency means allgather_reducescatter: Negamax has no "
        "other exchange of this kind",
    ]


def test_unknown_variables_of_other_servers_are_named_in_one_line(
    explained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "VLLM_NEW_THING": "1", "SGLANG_PP_COMM_OVERLAP": "1", "VLLM_USE_MODELSCOPE": "True",
        "VLLM_SERVICE_HOST": "10.0.0.1", "VLLM_PORT_8000_TCP_PORT": "8000", "NCCL_DEBUG": "INFO",
        "VLLM_ROCM_USE_AITER": "1",
    }  # fmt: skip
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    _, notes = explained("nano")
    aiter, unknown = notes.splitlines()
    assert aiter.startswith("note: VLLM_ROCM_USE_AITER has no effect: kernels are chosen")
    assert unknown.startswith("note: SGLANG_PP_COMM_OVERLAP, VLLM_NEW_THING have no effect: ")


LFS, MLX = "version https://git-lfs.github.com/spec/v1\n", {"group_size": 64, "bits": 4}
M2 = json.loads((EMBEDDED["nano"] / "config.json").read_text())


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("M2-Q4.gguf", "GGUF", "in the format GGUF, which is not supported (use a checkpoint in"),
        ("snapshots/abc/config.json", "{}", "the checkpoint is in snapshots/abc (use "),
        ("adapter_config.json", "{}", "contains an adapter; adapters are not supported (merge"),
        ("config.json", LFS, "is a Git LFS pointer; the real file was not downloaded (run"),
        (
            "config.json",
            json.dumps({**M2, "quantization": MLX}),
            "is quantized by MLX, whose layout is not supported",
        ),
        ("config.json", json.dumps({**M2, "quantization_config": MLX}), "is quantized by MLX"),
    ],
)
def test_refused_folders(refused: Any, tmp_path: Path, file: str, content: str, words: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(content)
    assert words in refused(f"plan {tmp_path} --gpus 1")


@pytest.mark.parametrize(("table", "line"), [(SERVER, "serve nano"), (BENCH, "bench serve")])
def test_every_foreign_option_is_translated_or_refused(
    table: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_of(find_command(GROUP, line.split())[0])  # type: ignore[arg-type]
    own = {name for each in options for name in (*each.names, *each.opposites)}
    samples = {Kind.SWITCH: [], Kind.VALUE: ["7"], Kind.LIST: ["7", "8"]}
    samples[Kind.JSON] = ['{"seven": 7}']
    assert not own & set(foreign_options(table))  # The table names no option of ours.
    for flag, entry in foreign_options(table).items():
        words, name = [flag, *samples[entry.kind]], flag
        if "_" in flag and flag.isupper():  # an environment variable
            words, name = [], flag.removeprefix("--")
            monkeypatch.setenv(name, "7")
        try:
            resolved = resolve(GROUP, [*line.split(), *words])
        except ConfigError as refusal:
            assert str(refusal).startswith(name) and str(refusal).endswith(")"), refusal
            assert entry.remedy is not None or entry.rule is not None, name
            continue
        monkeypatch.delenv(name, raising=False)
        assert entry.remedy is None, name
        sources = [choice.source for choice in resolved.choices.values()]
        note = f"{name} has no effect: {entry.reason}"
        assert resolved.notes == [note] or sources == [name], name


# Options of `vllm bench serve` (its page of 2026-09-08) and of SGLang's benchmark/serving.py that
# have other names than options of ours.
BENCHMARKS = """
append-result asr-max-audio-len-sec asr-min-audio-len-sec bfcl-categories blazedit-max-distance
blazedit-min-distance chat-template-kwargs custom-ensure-client-side-data disable-shuffle
enable-multimodal-chat hf-name hf-output-len hf-split hf-subset input-len insecure logprobs
lora-assignment lora-modules no-oversample no-reranker no-stream output-len plot-dataset-stats
plot-timeline probe-request-rate ramp-up-end-rps ramp-up-start-rps ramp-up-strategy
random-batch-size random-mm-base-items-per-request random-mm-bucket-config
random-mm-limit-mm-per-prompt random-mm-num-mm-items-range-ratio request-id-prefix self-timed
served-model-name skip-chat-template skip-tokenizer-init sonnet-input-len sonnet-output-len
sonnet-prefix-len spec-bench-category spec-bench-output-len speed-bench-category
speed-bench-dataset-subset speed-bench-output-len timed-trace-chunk-hash-size
timed-trace-label-hash-ids timed-trace-label-input-length timed-trace-label-output-length
timed-trace-label-timestamp timed-trace-sec-multiplier timeline-itl-thresholds tokenizer-mode
trust-remote-code use-beam-search
agentic-max-turns apply-chat-template cache-report dataset-offset disable-stream
extra-request-body fake-prefill flush-cache flush-cache-timeout gsp-fast-prepare
gsp-group-distribution gsp-num-groups gsp-num-turns gsp-ordered gsp-output-len
gsp-prompts-per-group gsp-question-len gsp-range-ratio gsp-send-routing-key gsp-system-prompt-len
gsp-zipf-alpha image-content image-count image-format image-resolution logprob-start-len lora-name
lora-request-distribution lora-zipf-alpha mooncake-num-rounds mooncake-slowdown-factor
mooncake-workload output-details output-file pd-separated plot-throughput print-requests
profile-activities profile-by-stage profile-decode-url profile-num-steps profile-output-dir
profile-prefill-url profile-prefix profile-stages profile-start-step profile-steps prompt-suffix
random-image-count random-image-num-images random-image-resolution return-logprob
return-routed-experts tag token-ids-logprob tokenize-prompt top-logprobs-num use-trace-timestamps
warmup-requests"""


def test_every_option_of_other_benchmarks_is_known() -> None:
    options = options_of(find_command(GROUP, ["bench", "serve"])[0])  # type: ignore[arg-type]
    known = {name for each in options for name in each.names} | set(foreign_options(BENCH))
    assert [name for name in BENCHMARKS.split() if f"--{name}" not in known] == []


@pytest.mark.parametrize(
    ("line", "resolved"),
    [
        ("chat nano --system {a --system {b", "chat --system={b nano"),  # texts that look like JSON
        (
            "bench serve --num-prompt 1 --output-details",
            "bench serve --save-detailed --num-prompts=1",
        ),
        ("generate nano --raw true", "generate --raw nano true"),
        ("generate nano Hello -p -- -n2", "generate --prompt=-- --n=2 nano Hello"),
    ],
)
def test_texts_are_kept_as_they_are(line: str, resolved: str) -> None:
    assert resolve(GROUP, line.split()).words == resolved.split()


@pytest.mark.parametrize(
    "line", [line for lines in EXAMPLES.values() for line in lines if "--config" not in line]
)
def test_examples_of_the_help_are_understood(line: str) -> None:
    words = shlex.split(line.partition(" < ")[0])[1:]
    resolved = resolve(GROUP, words)
    assert resolved.notes == []
    command = GROUP.commands[words[0]]
    command = command.commands[words[1]] if words[0] == "bench" else command
    # typer accepts the translated words.
    command.make_context("negamax", resolved.words[1 + (words[0] == "bench") :])


def test_completion(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for line, expected in (
        ("negamax serve nano --max-num-s", "--max-num-seqs"),
        ("negamax serve nano --dtype b", "bfloat16"),
        ("negamax ser", "serve"),
    ):
        monkeypatch.setenv("_NEGAMAX_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
        with pytest.raises(SystemExit):
            main([])
        assert capsys.readouterr().out.split() == [expected]


# --- launch lines --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES["understood"], ids=lambda case: case["name"])
def test_line_is_understood(explained: Any, case: dict[str, Any]) -> None:
    values, notes = explained(case["line"])
    assert {key: values[key][0].split()[0] for key in case["expected"]} == case["expected"]
    assert all(note.startswith("note: ") for note in notes.splitlines())


@pytest.mark.parametrize("case", CASES["refused"], ids=lambda case: case["name"])
def test_line_is_refused(refused: Any, case: dict[str, Any]) -> None:
    refusal = refused(f"serve {case['line']} --explain")
    assert all(word in refusal for word in case["words"])


@pytest.mark.parametrize("line", read_table("cli_resolve.remedies_of_the_refusals_start"))
def test_remedies_of_the_refusals_start(explained: Any, line: str) -> None:
    assert "secret" not in str(explained(line)[0])


# --- launchers -----------------------------------------------------------------------------------

LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "leader.svc"}
SLURM = {
    "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "gpu-[07-09]",
}  # fmt: skip
TORCHRUN = {
    "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}  # fmt: skip
NAMES = ("nnodes", "node_rank", "master_addr", "master_port")


def chosen(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], line: str = "serve nano -pp 6"
) -> list[str]:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    choices = resolve(GROUP, line.split()).choices
    return [choices[name].words[0].partition("=")[2] for name in NAMES if name in choices]


@pytest.mark.parametrize(
    ("variables", "options"),
    [
        (LWS, ["2", "1", "leader.svc"]),
        (SLURM, ["3", "2", "gpu-07"]),
        (TORCHRUN, ["2", "0", "10.0.0.1", "29501"]),
        (LWS | {"LWS_GROUP_SIZE": "1"}, []),
        (LWS | {"NEGAMAX_NNODES": "1"}, ["1"]),
        (LWS | {"NEGAMAX_MASTER_ADDR": "other"}, ["2", "1", "other"]),
        # The first line is the shell of an allocation; the others are jobs that start processes.
        ({"SLURM_NNODES": "2", "SLURM_NODEID": "0"}, []),
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "a", "RANK": "3"}, []),
    ],
)
def test_launcher_variables_are_used_without_flags_and_variables(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], options: list[str]
) -> None:
    assert chosen(monkeypatch, variables) == options


def test_only_servers_are_started_on_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, LWS, "generate nano -p x") == []


def test_refuses_more_than_one_process_per_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, processes = {"SLURM_STEP_NUM_TASKS": "12"}, {"LOCAL_WORLD_SIZE": "4"}
    with pytest.raises(ConfigError, match="--ntasks-per-node=1"):
        chosen(monkeypatch, SLURM | tasks)
    for name in SLURM:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match="--nproc-per-node 1"):
        chosen(monkeypatch, TORCHRUN | processes)


def test_first_host_of_a_slurm_list() -> None:
    hosts = {"a": "a", "a,b": "a", "n[3-5,9],x": "n3", "n[08,10]-ib,x": "n08-ib", "a-b-1": "a-b-1"}
    assert {each: first_host(each) for each in hosts} == hosts
