from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trl_offpolicy.diagnosis import write_report

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
        "Findings",
        "Summary",
        "Over the steps",
        "Tokens and sequences",
        "Largest log-ratios",
        "Example completions",
        "Settings",
    ]
    assert headings == expected
    assert "tiny &lt;model&gt;" in html and "trl 1.16" in html
    assert "disagree by KL(sampler||trainer) 0.0002 nats per token" in html
    assert "3 completions of steps 0 to 1 with 5 trainable tokens. 2 of them lack a finite log-prob" in html
    assert "k1 is 0.0959 nats per token" in html  # (ln 2 - ln 1.5) / 3
    assert html.count("<svg") == 1 + 1 + 5
    outside = set(re.findall(r"https?://[^\"' <)]+", html)) - {
        "http://www.w3.org/1999/xlink",
        "http://www.w3.org/2000/svg",
    }
    assert outside == set() and "<script" not in html and "<link" not in html


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
    assert 'Verdict over steps 1 to 4: <strong class="critical">critical</strong>' in html
    assert "misaligned log-probs" in html and "a constant factor" in html  # -1.1 for every -1.0
    assert "length trap" in html and "grows with its length" in html and "Dropped responses by length" in html
    assert "Shaded: 95 % interval" in html
