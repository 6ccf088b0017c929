from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

import trl_offpolicy
from lightning_module.spec import resolve
from trl_offpolicy import presets
from trl_offpolicy.cli import commands as cli


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [{"step": step, "reward": 0.5, "offpolicy/mismatch/kl_k3": 0.125} for step in range(4)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_report_writes_the_page_and_prints_table_and_path(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(run_dir)]) == 0
    out, err = capsys.readouterr()
    assert (run_dir / "report.html").is_file()
    assert out.startswith("verdict: critical  engine mismatch") and "offpolicy: measure" in out
    assert out.index("verdict:") < out.index("Run summary") < out.index("mean of")
    assert "0.1250" in out and out.rstrip().endswith(str(run_dir / "report.html")) and err == ""


def test_report_output_option(run_dir: Path, tmp_path: Path) -> None:
    assert cli.main(["report", str(run_dir), "--output", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").is_file() and not (run_dir / "report.html").exists()


def test_the_report_of_a_log_file_stands_beside_it(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(run_dir / "metrics.jsonl")]) == 0
    assert capsys.readouterr().out.rstrip().endswith(str(run_dir / "metrics.html"))
    assert (run_dir / "metrics.html").is_file()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda run: run / "absent", "run_dir must be an existing folder or log file, but got "),
        (lambda run: run.parent, "run_dir must contain metrics.jsonl or trainer_state.json, but got "),
    ],
)
def test_bad_run_folder_is_one_line_and_status_2(
    run_dir: Path, capsys: pytest.CaptureFixture[str], make: Any, message: str
) -> None:
    assert cli.main(["report", str(make(run_dir))]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"trl-offpolicy report: {message}")


def test_unwritable_output_is_one_line_and_status_2(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(run_dir), "--output", str(run_dir / "no" / "page.html")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--output must be a file in an existing folder, but got" in error


def test_a_crashed_run_warns_once_in_one_line(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 4, "rew')
    assert cli.main(["report", str(run_dir)]) == 0
    err = capsys.readouterr().err
    assert err.startswith("warning: ") and "skipped 1 line(s)" in err and err.count("\n") == 1


def test_every_unreadable_part_of_a_run_warns(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "rollouts.parquet").write_bytes(b"PAR1 cut")
    (run_dir / "run.json").write_text("{")
    assert cli.main(["report", str(run_dir)]) == 0
    err = capsys.readouterr().err
    assert err.count("warning: ") == err.count("\n") == 2
    assert "rollouts.parquet is left out" in err and "run.json is left out" in err


def test_tokenizer_option_decodes(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl_offpolicy.diagnosis.report import report

    class AutoTokenizer:
        @staticmethod
        def from_pretrained(name: str) -> Any:
            return types.SimpleNamespace(decode=lambda ids: f"{name}:{ids}")

    seen: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(AutoTokenizer=AutoTokenizer))
    make = report.make_report
    monkeypatch.setattr(report, "make_report", lambda run, *, decode: seen.update(decode=decode) or make(run))
    assert cli.main(["report", str(run_dir), "--tokenizer", "tiny"]) == 0
    assert seen["decode"]([1]) == "tiny:[1]"


def test_help_and_version_take_less_than_half_a_second_and_no_torch() -> None:
    code = (
        "import sys, time; start = time.process_time(); from trl_offpolicy.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: print(time.process_time() - start, sorted({'torch', 'numpy', 'yaml'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(trl_offpolicy.__file__).parents[1])}
    for option, shown in (("--help", "Say what is wrong with a run"), ("--version", trl_offpolicy.__version__)):
        command = [sys.executable, "-c", code, option]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=True)
        seconds, _, loaded = done.stdout.splitlines()[-1].partition(" ")
        assert shown in done.stdout and loaded == "[]" and float(seconds) < 0.5


@pytest.mark.parametrize(
    ("typed", "meant"), [("docter", "'doctor'"), ("Presets", "'presets'"), ("reprot", "'report'"), ("zzz", None)]
)
def test_a_mistyped_command_is_suggested(typed: str, meant: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([typed, "x"])
    line = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and f"but got {typed!r}." in line
    assert "Did you mean" not in line if meant is None else f"Did you mean {meant}" in line


def test_the_default_window_is_that_of_the_judge() -> None:
    from trl_offpolicy.diagnosis.verdict.judge import WINDOW

    assert cli.build_parser().parse_args(["doctor", "run"]).window == WINDOW


def test_doctor_prints_strict_json(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl_offpolicy.diagnosis.doctor import Examination

    found = {"attribution": {"explained": float("nan")}, "by_lag": [(1, float("inf"))]}
    monkeypatch.setattr(Examination, "as_dict", lambda self: found)
    assert cli.main(["doctor", str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"attribution": {"explained": None}, "by_lag": [[1, None]]}


@pytest.mark.parametrize(
    ("package", "hint"),
    [
        ("vllm", ' Install it in a checkout of trl-offpolicy: pip install -e ".[vllm]". On a machine without a GPU: '
                 "make install."),
        ("rl_doctor", ' Install it in a checkout of trl-offpolicy: pip install -e ".[doctors]".'),
        ("x", ""),
    ],
)  # fmt: skip
def test_a_missing_package_names_the_command(
    package: str, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def needs(parser: argparse.ArgumentParser) -> cli.Runner:
        """Need a package."""

        def run(args: argparse.Namespace) -> int:
            raise ModuleNotFoundError(f"No module named '{package}.part'", name=f"{package}.part")

        return run

    monkeypatch.setitem(cli.COMMANDS, "needs", needs)
    assert cli.main(["needs"]) == 1
    assert capsys.readouterr().err == f"trl-offpolicy needs: package {package} is not installed.{hint}\n"


@pytest.mark.parametrize("argv", [[], ["unknown"], ["report"], ["doctor"], ["report", "x", "--what"]])
def test_bad_arguments_exit_with_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert "usage: trl-offpolicy" in capsys.readouterr().err


def test_a_mistyped_option_is_named_with_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--fial-on", "critical", "folder"])
    said = capsys.readouterr().err.splitlines()[-1]
    assert (
        "trl-offpolicy doctor: error: an option must be one of --help, but got --fial-on. Did you mean '--fail-on'"
        in said
    )
    assert "folder" not in said


def test_the_limits_of_the_doctor_are_listed_without_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--threshold", "help"]) == 0
    assert "kl_high " in capsys.readouterr().out


def test_a_family_of_presets_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets", "verl"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = lines[1 : lines.index("")]
    assert lines[0] == "verl" and [line.split()[0] for line in listed] == presets.groups()["verl"]


def test_presets_are_listed_under_their_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["general", f"  {'measure':<31}  w = 1, nothing dropped"]
    assert lines.index("paper") < lines.index("skyrl") < lines.index("verl")
    assert "  paper/tis                        w_t = min(pi_old / mu, C); C = 2" in lines
    legend = "\n".join(lines[lines.index("") :])
    assert legend.startswith("\nmu = the engine that sampled") and "rho_geo = its geometric mean" in legend


def test_presets_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets", "paper/tis", "verl/bypass_pg_is"]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    assert first.startswith("paper/tis\n  formula:  w_t = min(pi_old / mu, C)\n")
    assert second.startswith("verl/bypass_pg_is\n") and "source:   verl 0.9.1" in second


def pasted(name: str, capsys: pytest.CaptureFixture[str]) -> list[Any]:
    """What the YAML blocks of ``presets NAME`` say for ``offpolicy``."""
    assert cli.main(["presets", name]) == 0
    _, _, text = capsys.readouterr().out.partition("\n  # to paste\n")
    return [
        yaml.safe_load(textwrap.dedent(one)).get("offpolicy") for one in text.split("  # or the same by its parts\n")
    ]


@pytest.mark.parametrize("name", presets.names())
def test_the_yaml_of_a_preset_is_that_preset(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    want = presets.get(name)
    for one in pasted(name, capsys):
        found = resolve(one or "measure")  # all of it may be in the fields beside
        assert found.objective == want.objective
    assert pasted("paper/tis", capsys) == [
        {"preset": "paper/tis", "options": {"max_weight": 2.0}},
        {"correction": {"weight": {"type": "truncate", "max_weight": 2.0}}},
    ]


def test_two_presets_are_compared(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["presets", "--diff", "paper/tis", "verl/decoupled_k3_rs"]) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "semantics paper/tis verl/decoupled_k3_rs" in rows
    assert "weight: type TruncateWeight none (1)" in rows
    assert "keep: divergence_k3_sequence_mean - high=0.01, low=None, on pi_old / mu" in rows
    assert "KL of dropped tokens stays goes with them" in rows
    assert not any(row.startswith("mode") for row in rows)


def test_presets_that_compute_the_same_are_said_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets", "--diff", "paper/icepop", "ring-1t/icepop"]) == 0
    assert capsys.readouterr().out == "paper/icepop and ring-1t/icepop compute the same numbers.\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["auto"], "write 'offpolicy: auto'"),
        (["--diff", "paper/tis", "auto"], "write 'offpolicy: auto'"),
        (["paper/tiss"], "but got 'paper/tiss'. Did you mean 'paper/tis'"),
        (["--diff", "paper/tis", "paper/icpop"], "but got 'paper/icpop'. Did you mean 'paper/icepop'"),
        (["paper/tis", "--diff", "paper/tis", "measure"], "--diff must stand alone, but got also paper/tis."),
    ],
)
def test_bad_presets_are_one_line_and_status_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["presets", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


def test_a_subcommand_is_one_function(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def hello(parser: argparse.ArgumentParser) -> cli.Runner:
        """Say hello."""
        parser.add_argument("name")

        def run(args: argparse.Namespace) -> int:
            if args.name == "nobody":
                raise ModuleNotFoundError("No module named 'x'", name="x")
            print(f"hello {args.name}")
            return 3

        return run

    monkeypatch.setitem(cli.COMMANDS, "hello", hello)
    assert cli.main(["hello", "you"]) == 3
    assert capsys.readouterr().out == "hello you\n"
    assert cli.main(["hello", "nobody"]) == 1
    assert capsys.readouterr().err == "trl-offpolicy hello: package x is not installed.\n"
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "Say hello." in capsys.readouterr().out
