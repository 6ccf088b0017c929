from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trl_offpolicy.diagnosis import write_report
from trl_offpolicy.diagnosis.report.configuration import configuration
from trl_offpolicy.diagnosis.report.demo import DEMO_RUN
from trl_offpolicy.diagnosis.report.key_numbers import key_numbers
from trl_offpolicy.run_folder.run_data import MetricsLog

METRICS = [
    {"step": step, "time": 1.0, "reward": 0.25 * step, "offpolicy/mismatch/kl_k3": 0.0002} for step in range(1, 5)
]


def test_report_holds_every_part_and_loads_nothing(write_run: Any, rollout_parts: Any) -> None:
    run = write_run(METRICS, rollout_parts, {"model": "tiny <model>", "versions": {"trl": "1.16"}})
    path = write_report(run)
    html = path.read_text(encoding="utf-8")
    assert path == run / "report.html"
    headings = re.findall(r"<h2>(.*?)</h2>", html)
    expected = [
        "What to do",
        "Findings",
        "Worst responses",
        "Largest log-ratios",
        "Summary",
        "Over the steps",
        "Tokens and sequences",
        "Example completions",
    ]
    assert headings == expected
    folded = html[html.rindex("<details>") :]
    assert "model: tiny &lt;model&gt;\nversions:\n  trl: &#39;1.16&#39;\n</pre>" in folded
    assert "disagree by KL(sampler||trainer) 0.0002 nats per token" in html
    assert "3 completions of steps 1 to 2 with 5 trainable tokens. 2 of them lack a finite log-prob" in html
    assert "k1 is 0.0959 nats per token" in html  # (ln 2 - ln 1.5) / 3
    assert html.count("<svg") == 2 + 1 + 1 + 5  # key numbers, reward, k3, rollouts
    outside = set(re.findall(r"https?://[^\"' <)]+", html)) - {
        "http://www.w3.org/1999/xlink",
        "http://www.w3.org/2000/svg",
    }
    assert outside == set() and html.count("<script") == 1 and "<link" not in html


def test_report_without_rollouts_says_so(write_run: Any) -> None:
    html = write_report(write_run(METRICS)).read_text(encoding="utf-8")
    assert "rollouts.parquet is missing, empty or unreadable): metrics only" in html
    assert "Largest log-ratios" not in html


def test_report_without_sampler_logps_still_shows_examples(write_run: Any, rollout_parts: Any) -> None:
    html = write_report(write_run(METRICS, [[rollout_parts[0][1]]])).read_text(encoding="utf-8")
    assert "No token has both log-probs" in html
    assert "Example completions" in html and "Largest log-ratios" not in html


def test_report_goes_where_it_is_told_and_decodes(write_run: Any, rollout_parts: Any, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere.html"
    run = write_run(METRICS, rollout_parts)
    assert write_report(run, target, decode=lambda ids: "|".join(f"tok{i}" for i in ids)) == target
    assert "<mark>tok5</mark>tok6|tok7" in target.read_text(encoding="utf-8")
    assert not (run / "report.html").exists()


def test_bad_folders_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"run_dir must contain metrics\.jsonl"):
        write_report(tmp_path)


@pytest.mark.integration
def test_importing_the_diagnosis_loads_no_plotting_or_table_package() -> None:
    code = (
        "import sys, trl_offpolicy.diagnosis, trl_offpolicy.cli.commands\n"
        "print([m for m in ('matplotlib', 'jinja2', 'pyarrow', 'pandas', 'rich', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_report_says_what_is_wrong_and_shows_the_length_trap(write_run: Any) -> None:
    rows = [{**row, "offpolicy/mismatch/kl_k3": 0.2, "offpolicy/mismatch/kl_k3_ci95": 0.05} for row in METRICS]
    tokens = [
        {
            "step": 1,
            "completion_ids": [1] * n,
            "completion": "text",
            "prompt": "prompt",
            "completion_mask": [True] * n,
            "sampling_per_token_logps": [-1.0] * n,
            "old_per_token_logps": [-1.1] * n,
            "keep_mask": [n < 31 or n % 5 == 0] * n,
        }
        for n in range(1, 61)
    ]
    info = {"correction": "Correction(weight=None, keep=(RatioBand(low=0.5, high=2.0, level='sequence'),))"}
    html = write_report(write_run(rows, [tokens], info)).read_text(encoding="utf-8")
    assert '<strong class="critical">critical</strong> Engine mismatch' in html and "Judged: steps 1 to 4;" in html
    assert "misaligned log-probs" in html and "differ by the same number" in html  # -1.1 for every -1.0
    assert "length trap" in html and "grows with its length" in html and "Dropped responses by length" in html
    assert "Shaded: 95 % interval" in html


def test_the_page_begins_with_verdict_numbers_and_fix(tmp_path: Path) -> None:
    html = write_report(DEMO_RUN, tmp_path / "report.html").read_text(encoding="utf-8")
    places = [html.index(text) for text in ('class="verdict"', 'class="cards"', "<h2>What to do", "<h2>Findings")]
    assert places == sorted(places) and html.rindex("<details>") > html.index("<h2>Example completions")
    cards = html[places[1] : places[2]]
    assert cards.count("<svg") == 3 and "share of tokens dropped" in cards
    assert cards.count("mean of the last 16 logged steps") == 3 and "healthy up to 0.02" in cards
    assert re.findall("<pre>(.*?)</pre>", html[places[2] : places[3]]) == ["engine: {check_sync: true}"]
    assert "offpolicy: measure" not in html and "First the system: the same dtype" not in html
    assert "Then judge again: &#34;beyond correction&#34; may go away" in html
    assert "Correction(" not in html and "type: ratio_band\n    low: 0.5\n" in html


def test_the_three_numbers_are_means_of_the_judged_steps_with_their_limits() -> None:
    rows = [
        {
            "step": float(step),
            "offpolicy/mismatch/kl_k3": 0.001 * step,
            "offpolicy/keep/dropped_token_fraction": 0.05,
            "offpolicy/weight_applied/ess_token": 0.9,
        }
        for step in range(1, 31)
    ]
    distance, data, gain = key_numbers(MetricsLog(tuple(rows)))
    assert (distance.value, distance.bad) == ("0.0205", True)  # mean of 0.011 to 0.030
    assert distance.note == "mean of the last 20 logged steps, healthy up to 0.02"
    assert (data.label, data.value, data.bad) == ("effective sample size, applied weights", "0.9000", False)
    assert (gain.value, gain.note, gain.svg) == ("–", "not logged", "")
    dropping = [{**row, "offpolicy/keep/dropped_token_fraction": 0.3} for row in rows]
    assert key_numbers(MetricsLog(tuple(dropping)))[1][:2] == ("share of tokens dropped", "0.3000")


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("Preset(max=-1, parts=(BandWeight(low=0.5),))", {"max": -1, "parts": [{"type": "band", "low": 0.5}]}),
        ("vllm colocate {'dtype': 'float32'}", {"vllm colocate": {"dtype": "float32"}}),
        ("Their(x=inf, y=f(1))", {"x": "inf", "y": "f(1)"}),
        ("recomputed (once)", "recomputed (once)"),
        ("Empty()", "Empty()"),
        ("f(x) and {", "f(x) and {"),
        ("__import__('os').system('x')", "__import__('os').system('x')"),
    ],
)
def test_configuration_has_settings_and_no_python_text(text: str, settings: object) -> None:
    assert yaml.safe_load(configuration({"entry": text})) == {"entry": settings}
