from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_policy import make

from trl_offpolicy.cli import commands as cli
from trl_offpolicy.diagnosis.attribution.attribute import attribute
from trl_offpolicy.diagnosis.attribution.breakdown import as_rollouts, break_down
from trl_offpolicy.diagnosis.attribution.recommend import geometric_band, recommend, token_cap
from trl_offpolicy.diagnosis.probe.options import ProbeOptions
from trl_offpolicy.diagnosis.probe.probe import measure
from trl_offpolicy.diagnosis.probe.sides import read_prompts

REAL = Path(__file__).parents[3] / ".cache/SmolLM2-135M-Instruct"


@pytest.fixture
def probe(model_folder: Callable[[str], Path], tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """``probe(*options)``: exit status and probe.json of a tiny model with HF generate."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w1 w2\nw3\n\nw4 w9\nw50 w51 w5\n")

    def run(*options: str) -> tuple[int, dict[str, Any]]:
        common = ["--model", str(model_folder("llama")), "--engine", "hf", "--prompts", str(prompts), "--samples", "8"]
        status = cli.main(["probe", *common, "--max-tokens", "16", "--output", str(tmp_path / "out"), *options])
        written = tmp_path / "out" / "probe.json"
        return status, json.loads(written.read_text()) if written.exists() else {}

    return run


@pytest.mark.parametrize(
    ("options", "cause", "preset"),
    [
        ((), "none", "measure"),
        (("--temperature", "0.9"), "temperature", None),
        (("--top-p", "0.8"), "truncated_sampling", None),
        (("--top-p", "0.8", "--temperature", "0.9", "--mirror"), "none", "measure"),
        (("--weight-rounding", "int8"), "precision", "paper/tis"),
    ],
)
def test_probe_names_the_cause_and_what_to_do(probe: Any, options: Any, cause: str, preset: str | None) -> None:
    status, found = probe(*options)
    assert status == 0
    assert found["attribution"]["cause"] == cause
    assert found["recommendation"]["preset"] == preset and found["recommendation"]["yaml"]
    assert found["metrics"]["mismatch/kl_k3_ci95"] >= 0 and found["metrics"]["noise_floor/kl_k3"] < 1e-9
    assert [len(one["bins"]) > 0 for one in found["breakdowns"]] == [True] * 4


def test_limits_decide_the_exit_status_and_are_named(probe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--temperature", "0.9", "--no-hypotheses")
    assert probe(*options, "--max-kl", "1e-4", "--min-pearson", "0.999999")[0] == 3
    out = capsys.readouterr().out
    assert "is above --max-kl 0.0001" in out and "is below --min-pearson" in out and "temperature mismatch" in out
    assert probe(*options, "--max-kl", "1", "--min-pearson", "0.5")[0] == 0


def test_the_page_holds_verdict_tables_and_figures_and_nothing_from_outside(probe: Any, tmp_path: Path) -> None:
    probe("--top-p", "0.8")
    page = (tmp_path / "out" / "probe.html").read_text()
    assert "truncated sampling" in page and page.count("<svg") >= 5 and "By kind of token" in page
    assert "http://" not in page.replace("http://www.w3.org", "") and "<script" not in page


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--samples", "0"), "samples must be a whole number >= 1, but got 0"),
        (("--top-p", "1.5"), "top_p must be in (0, 1]"),
        (("--weight-rounding", "int7"), "--weight-rounding.type must be one of"),
        (("--engine", "sglang"), "engine must be vllm, hf or the URL of a server"),
        (("--quantization", "fp8"), "quantization must be left out with engine hf"),
        (("--max-kl", "nan"), "--max-kl must be a finite number"),
        (("--model", "no/such/folder/here"), "no/such/folder/here"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    probe: Any, capsys: pytest.CaptureFixture[str], options: Any, message: str
) -> None:
    status, _ = probe(*options)
    err = capsys.readouterr().err
    assert status == 2 and message in err


def test_prompts_come_from_text_and_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "a"}, {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read_prompts(path) == ("a", "b")
    path.write_text('{"question": "a"}')
    with pytest.raises(ValueError, match="line 1 must be an object with the key prompt"):
        read_prompts(path)
    path.write_text("")
    with pytest.raises(ValueError, match="at least one prompt"):
        read_prompts(path)


# --------------------------------------------------------------------------------------------------- recommendation


def recommended(cause: str, size: float = 1.0) -> Any:
    evidence = make(cause, size=size)
    return recommend(evidence, attribute(evidence), measure(evidence))


def test_no_correction_at_the_floor_and_none_before_a_fault_is_repaired() -> None:
    assert recommended("none").yaml == "offpolicy: measure\n"
    for cause in ("temperature", "truncated_sampling", "dropout", "misalignment", "tool_tokens"):
        found = recommended(cause)
        assert found.preset is None and "fault" in found.why[0]


def test_presets_follow_the_size_of_the_mismatch() -> None:
    assert recommended("precision", 1.0).preset == "paper/tis"
    assert recommended("precision", 8.0).preset == "paper/geometric-mask"
    assert recommended("routing", 1.0).preset == "paper/icepop"
    assert recommended("precision", 30.0).preset is None  # the system first


def test_routing_is_replayed_by_the_steps_that_a_generation_serves() -> None:
    evidence = make("routing")
    found = {
        steps: recommend(evidence, attribute(evidence), measure(evidence), steps=steps).why[-1]
        for steps in (None, 1, 2, 8)
    }
    assert found[None].endswith("none at 1, r2 at 2, r3 at 4.")
    assert [found[n].split()[1] for n in (1, 2, 8)] == ["none", "r2", "r3"]
    assert not any("routing_replay" in sentence for sentence in recommended("precision").why)


def test_recommended_yaml_is_a_preset_with_its_options() -> None:
    import yaml

    from trl_offpolicy import presets

    for size in (1.0, 8.0):
        found = recommended("precision", size)
        spec = yaml.safe_load(found.yaml)["offpolicy"]
        assert spec["preset"] == found.preset and spec["options"] == dict(found.thresholds)
        presets.get(spec["preset"], **spec["options"])


def test_cap_and_band_are_quantiles_of_the_data() -> None:
    rng = np.random.default_rng(0)
    d = rng.normal(0, 0.3, (200, 50))
    assert token_cap(d) == pytest.approx(np.exp(0.3 * 3.09), rel=0.1)
    assert token_cap(d * 0.01) == 1.2 and token_cap(d * 10) == 5.0
    low, high = geometric_band(d)
    assert high == pytest.approx(np.exp(0.3 / np.sqrt(50) * 2.4), rel=0.05) and low * high == pytest.approx(1, abs=1e-3)
    with_outliers = d.copy()
    with_outliers[:20, 0] = 15.0
    assert geometric_band(with_outliers)[1] == pytest.approx(high, rel=0.01)


# -------------------------------------------------------------------------------------------------------- breakdowns


def test_bins_hold_every_token_once_and_their_shares_add_up() -> None:
    evidence = make("prompt_difference")
    words = {token: ("<s>", " a", "b", "7", ".", "\n", " ")[token % 7] for token in range(100)}
    found = break_down(evidence, decode=words.__getitem__, special=frozenset({0}))
    for one in found:
        assert sum(entry.tokens for entry in one.bins) == evidence.observed.sum()
        assert sum(entry.share for entry in one.bins) == pytest.approx(1)
    position = found[1].bins
    assert position[0].label == "0 to 2" and position[0].k3 > 5 * position[-1].k3
    kinds = {entry.label for entry in found[3].bins}
    assert kinds == {"special", "word", "inside a word", "number", "punctuation", "line break", "space", "other"}


def test_rollouts_for_the_figures_hold_the_same_numbers() -> None:
    evidence = make("precision")
    rollouts = as_rollouts(evidence)
    assert rollouts.trainable.sum() == len(rollouts.row) == evidence.observed.sum()
    d = evidence.old_per_token_logps - evidence.sampling_per_token_logps
    np.testing.assert_allclose(rollouts.log_ratio, d[rollouts.row, rollouts.position], atol=1e-6)


def test_measure_agrees_with_the_definition() -> None:
    evidence = make("precision")
    d = evidence.old_per_token_logps - evidence.sampling_per_token_logps
    metrics = measure(evidence)
    assert metrics["mismatch/kl_k3"] == pytest.approx(np.mean(np.expm1(d) - d), rel=1e-3)
    assert metrics["mismatch/kl_k1"] == pytest.approx(-d.mean(), rel=1e-3, abs=1e-6)
    w = np.exp(d)
    assert metrics["weight_applied/ess_token"] == pytest.approx(w.sum() ** 2 / (w.size * (w**2).sum()), rel=1e-4)


def test_options_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="trainer_dtype must be float32, bfloat16 or float16, but got 'int8'"):
        ProbeOptions(model="m", trainer_dtype="int8")
    with pytest.raises(ValueError, match="trainer_device must be auto, cpu, cuda or cuda:N, but got 'gpu'"):
        ProbeOptions(model="m", trainer_device="gpu")
    with pytest.raises(ValueError, match="trainer_device must be a device of this machine, but got 'cuda:99'"):
        ProbeOptions(model="m", trainer_device="cuda:99")
    with pytest.raises(ValueError, match="weight_rounding must be left out with a server"):
        ProbeOptions(model="m", engine="http://127.0.0.1:8000", weight_rounding="int8")


# ------------------------------------------------------------------------------------------------- real engine, slow


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(not REAL.is_dir(), reason="the quickstart's model is not there (make quickstart)")
@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ((), "none"),
        (("--weight-rounding", "int8"), "precision"),
        (("--top-p", "0.8"), "truncated_sampling"),
        (("--temperature", "0.9"), "temperature"),
    ],
)
def test_real_vllm_and_the_quickstart_model(tmp_path: Path, options: Any, cause: str) -> None:
    """Each in its own process: vLLM does not give its memory back. Under two minutes on two free cores."""
    import subprocess
    import sys

    start = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "trl_offpolicy",
        "probe",
        "--model",
        str(REAL),
        "--output",
        str(tmp_path),
    ]
    subprocess.run([*command, *options], check=True, timeout=500)
    found = json.loads((tmp_path / "probe.json").read_text())
    assert found["attribution"]["cause"] == cause
    assert sum(found["seconds"].values()) <= time.monotonic() - start
    print(f"{cause}: {time.monotonic() - start:.0f} s")
