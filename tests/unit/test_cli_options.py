import dataclasses
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from negamax.base.errors import ConfigError
from negamax.cli.options import add_options, parse_bytes
from negamax.cli.resolve import resolve
from negamax.options.engine import EngineOptions
from negamax.options.flags import option
from tests.tables import read_table


def group_of(command: Any) -> typer.core.TyperGroup:
    app = typer.Typer()
    app.command("run")(command)
    app.callback()(lambda: None)
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    return group


SEEN: list[EngineOptions] = []


@cache
def group_with(**defaults: Any) -> typer.core.TyperGroup:
    @add_options(defaults=defaults)
    def command(*, engine: EngineOptions) -> None:
        SEEN.append(engine)

    return group_of(command)


def parsed(*arguments: str, **defaults: Any) -> EngineOptions:
    group = group_with(**defaults)
    group.main(resolve(group, ["run", *arguments]).words, standalone_mode=False)
    return SEEN.pop()


def test_defaults_and_switches() -> None:
    assert parsed("nano") == EngineOptions(model="nano")
    assert parsed("nano", max_num_seqs=4).max_num_seqs == 4
    for flag in ("--no-enable-prefix-caching", "--disable-radix-cache"):
        assert not parsed("nano", flag).enable_prefix_caching
    assert parsed("nano", "--enable-prefix-caching").enable_prefix_caching
    for flag in ("--no-async-scheduling", "--disable-overlap-schedule"):
        assert not parsed("nano", flag).enable_overlap


@pytest.mark.parametrize(("flags", "field", "value"), read_table("cli_options.names_of_flags"))
def test_names_of_flags_set_their_field(flags: tuple[str, ...], field: str, value: object) -> None:
    expected = dataclasses.replace(EngineOptions(model="nano"), **{field: value})  # type: ignore[arg-type]
    for flag in flags:
        assert parsed("nano", flag, str(value)) == expected
        assert parsed(f"{flag}={value}", "nano") == expected


@pytest.mark.parametrize(
    ("line", "config"),
    [
        (
            "-sc.method eagle3 --speculative-config.model a/b -sc.num_speculative_tokens=3",
            {"method": "eagle3", "model": "a/b", "num_speculative_tokens": 3},
        ),
        (
            "--speculative-algorithm EAGLE3 --speculative-draft-model-path a/b "
            "--speculative-num-steps 3 --speculative-eagle-topk 1 "
            "--speculative-num-draft-tokens 4 --speculative-adaptive false",
            {"method": "EAGLE3", "model": "a/b", "num_speculative_tokens": 3}
            | {"num_draft_tokens": 4, "adaptive": False},
        ),
        (
            "--speculative-algorithm NGRAM --speculative-num-draft-tokens 8 "
            "--speculative-ngram-max-match-window-size 12",
            {"method": "NGRAM", "num_draft_tokens": 8, "prompt_lookup_max": 12},
        ),
        (
            "--speculative-algorithm DSPARK --speculative-dspark-block-size 7",
            {"method": "DSPARK", "num_speculative_tokens": 7},
        ),
        (
            "--speculative-algorithm DFLASH --spec-model a/b --speculative-dflash-block-size 8",
            {"method": "DFLASH", "model": "a/b", "num_draft_tokens": 8},
        ),
        ("--spec-method ngram --spec-tokens 2", {"method": "ngram", "num_speculative_tokens": 2}),
        ("--speculative-algorithm none", None),
    ],
)
def test_speculation_by_names_of_both_servers(line: str, config: dict[str, object] | None) -> None:
    assert parsed("nano", *line.split()).speculative_config == config


def test_refused_speculation_and_names_that_are_no_utf8() -> None:
    for value, kind in (("[1]", "list"), ("null", "null")):
        with pytest.raises(ConfigError, match=f"--speculative-config is a JSON {kind};"):
            parsed("nano", "--speculative-config", value)
    with pytest.raises(ConfigError, match="has no method"):
        parsed("nano", "--speculative-config", "{}")
    assert parsed("nano", "--speculative-config", "").speculative_config is None
    with pytest.raises(ConfigError, match="allowed: eagle3, dspark, dflash, ngram"):
        parsed("nano", "--speculative-algorithm", "NEXTN")
    for name in ("model", "download_dir", "weight_cache"):
        with pytest.raises(ConfigError, match=r"-\w+ is 'm\\udcff', not valid UTF-8"):
            EngineOptions(**{"model": "nano", name: "m\udcff"})


def test_model_may_be_given_as_an_option() -> None:
    for words in (("--model", "x"), ("--model-path", "x"), ("x",), ("x", "--model", "x")):
        assert parsed(*words).model == "x"
    with pytest.raises(ConfigError, match="pass only one of MODEL"):
        parsed("x", "--model", "y")
    with pytest.raises(ConfigError, match="MODEL is missing"):
        parsed()


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("123", 123), ("2k", 2000), ("2KiB", 2048), ("1.5G", 1_500_000_000), ("4 gib", 4 * 2**30)],
)
def test_sizes_are_read_in_both_units(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "-1", "lots", "1x", "1e9", "9" * 100])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_bytes(text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithOneMore(EngineOptions):
    wave_len: int = option(3, "Set the wave's length.", "-wl", also="--wl-size", least=1)


def test_a_new_field_is_an_option_with_flag_variable_key_and_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[WithOneMore] = []

    @add_options()
    def command(*, engine: WithOneMore) -> None:
        seen.append(engine)

    group = group_of(command)

    def run(*words: str) -> int:
        resolved = resolve(group, ["run", "nano", *words])
        group.main(resolved.words, standalone_mode=False, obj=resolved)
        return seen[-1].wave_len

    file = tmp_path / "options.toml"
    file.write_text("wave_len = 7\n")
    assert run() == 3
    assert run("--wave-len", "4") == run("-wl", "4") == run("--wl-size=4") == 4
    assert run("--config", str(file)) == 7
    monkeypatch.setenv("NEGAMAX_WAVE_LEN", "6")
    assert run("--config", str(file)) == 6
    run("--explain")
    assert re.search(r"^wave-len +6 +NEGAMAX_WAVE_LEN$", capsys.readouterr().out, re.MULTILINE)
    with pytest.raises(ConfigError, match="--wave-len is 0; allowed: 1 or more"):
        run("--wave-len", "0")
    with pytest.raises(ConfigError, match="did you mean --wave-len"):
        run("--wave-length", "1")
    monkeypatch.setenv("COLUMNS", "200")
    run("--help")
    assert re.search(r"--wave-len .*-wl .*Set the wave's length", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("extra", "gib", "folder"),
    [
        ({}, None, None),
        (
            {"cpu_bytes_to_use": 0, "secondary_tiers": [{"type": "fs", "root_dir": "/a"}]},
            None,
            None,
        ),
        ({"cpu_bytes_to_use": 3 << 30}, 3.0, None),
        ({"cpu_bytes_to_use": 1 << 29, "secondary_tiers": [{"type": "p2p"}]}, 0.5, None),
        (
            {"cpu_bytes_to_use": 1 << 30, "secondary_tiers": [{"type": "fs", "root_dir": "/a"}]},
            1.0,
            "/a",
        ),
    ],
)
def test_the_tiers_of_vllms_offloading_connector_are_kept(
    extra: dict[str, object], gib: float | None, folder: str | None
) -> None:
    given = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    given |= {"kv_connector_extra_config": extra}
    options = EngineOptions("nano", kv_transfer_config=given)
    assert (options.host_gib, options.has_host_blocks) == (gib, gib is not None)
    assert options.file_folder == folder
    assert options.kv_transfer is None
    own = EngineOptions(
        "nano", kv_transfer_config=given, kv_offloading_size=8.0, kv_offloading_path="/b"
    )
    assert (own.host_gib, own.file_folder) == (8.0, "/b")
    with pytest.raises(ConfigError, match="--kv-offloading-size stores whole"):
        EngineOptions("nano", kv_offloading_size=1.0, enable_prefix_caching=False)
    if gib is not None:
        with pytest.raises(ConfigError, match="--kv-transfer-config stores whole"):
            EngineOptions("nano", kv_transfer_config=given, enable_prefix_caching=False)
