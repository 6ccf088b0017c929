"""The quickstart recipe itself, shortened: same entry point, same configuration, the real model and engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from processes import run_command
from screen_lines import LAUNCHED, unknown_warnings

from trl_offpolicy import Objective
from trl_offpolicy.presets.parsing import parse_advantages, parse_objective
from trl_offpolicy.trl.config import OffPolicyGRPOConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_quickstart_runs_and_reports(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "accelerate.commands.launch", "recipes/grpo.py"]
    options = ["--config", "recipes/quickstart/config.yaml", "--max_steps", "2", "--output_dir", str(tmp_path)]
    done = run_command([*command, *options], seconds=1700, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert unknown_warnings(done.stdout + done.stderr, LAUNCHED) == []
    assert "KL k3" in done.stdout and "report.html" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    kl = [row["offpolicy/mismatch/kl_k3"] for row in rows if "offpolicy/mismatch/kl_k3" in row]
    assert len(kl) == 2 and all(1e-4 < value < 0.1 for value in kl)  # FP8 weights: a real mismatch
    assert (tmp_path / "report.html").stat().st_size > 50_000
    assert list((tmp_path / "rollouts.parquet").glob("part-*.parquet"))


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(3600)
def test_the_doctors_settings_remove_the_quickstarts_mismatch(tmp_path: Path) -> None:
    """The settings that the doctor gives, put into the quickstart's own configuration."""
    config = ROOT / "recipes" / "quickstart" / "config.yaml"
    before = mismatch_of(config, tmp_path / "before")
    doctor = [sys.executable, "-m", "trl_offpolicy", "doctor", str(tmp_path / "before"), "--json"]
    said = json.loads(subprocess.run(doctor, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert said["attribution"]["cause"] == "precision"
    changed = yaml.safe_load(config.read_text()) | yaml.safe_load(said["advice"]["yaml"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(changed))
    after = mismatch_of(tmp_path / "config.yaml", tmp_path / "after")
    assert before > 1e-4 and after < 1e-8  # nats per token: FP8 weights; float32 on both sides


def mismatch_of(config: Path, folder: Path) -> float:
    """KL k3 of the second of two steps of the quickstart, nats per token."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "recipes/grpo.py", "--config", str(config)]
    options = ["--max_steps", "2", "--eval_strategy", "no", "--eval_on_start", "false", "--output_dir", str(folder)]
    done = run_command([*command, *options], seconds=1700, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found: float = [row["offpolicy/mismatch/kl_k3"] for row in rows if "offpolicy/mismatch/kl_k3" in row][-1]
    return found


@pytest.mark.parametrize("recipe", ["quickstart", "objectives"])
def test_recipes_describe_an_objective(recipe: str, tmp_path: Path) -> None:
    spec = yaml.safe_load((ROOT / "recipes" / recipe / "config.yaml").read_text())
    args = OffPolicyGRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, report_to="none", use_vllm=True, offpolicy=spec["offpolicy"]
    )
    loss = args.preset.objective.policy_loss
    assert type(loss).__name__ == {"quickstart": "PPOClip", "objectives": "DPPO"}[recipe]


def test_lines_of_the_objectives_readme_are_objectives() -> None:
    text = (ROOT / "recipes" / "objectives" / "README.md").read_text()
    lines = [yaml.safe_load(line)["policy_loss"] for line in re.findall(r"^ +policy_loss: .*$", text, re.MULTILINE)]
    assert len(lines) == 5
    for line in lines:
        parse_objective({"policy_loss": line}, where="objective", base=Objective())
    estimators = [yaml.safe_load(line)["advantages"] for line in re.findall(r"^ +advantages: .*$", text, re.MULTILINE)]
    assert len(estimators) == 3 and all(parse_advantages(line, where="advantages") for line in estimators)


def test_comments_of_the_objectives_recipe_are_options(tmp_path: Path) -> None:
    """Each line that is commented out, put in force, is a configuration of its own."""
    text = (ROOT / "recipes" / "objectives" / "config.yaml").read_text()
    plain = {"use_cpu": True, "bf16": False, "report_to": "none", "use_vllm": True}
    options = re.findall(r"^ +# (?:proximal|advantages): .*$", text, re.MULTILINE)
    assert len(options) == 2
    for line in options:
        spec = yaml.safe_load(text.replace(line, line.replace("# ", "", 1)))["offpolicy"]
        preset = OffPolicyGRPOConfig(str(tmp_path), **plain, offpolicy=spec).preset
        assert (preset.advantages is not None) == ("advantages" in line)
        assert (preset.objective.proximal != Objective().proximal) == ("proximal" in line)
