"""The table by version lag, from the log of a run: in the doctor's words, as JSON and on the report page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trl_offpolicy.cli.commands import main
from trl_offpolicy.diagnosis.lags import LagRow, lag_table
from trl_offpolicy.diagnosis.report.report import write_report
from trl_offpolicy.run_folder.run_data import MetricsLog


def lag(name: str, tokens: float, size: float, **more: float) -> dict[str, float]:
    values = {"tokens": tokens, "log_ratio_mean": -size, "logp_diff_mean": size, "ess_token": 1 - size, **more}
    return {f"offpolicy/lag/{name}/{key}": value for key, value in values.items()}


ROWS = (
    {"step": 1.0, "loss": 0.1, **lag("0", 100, 0.01, clip_fraction=0.0)},
    {"step": 2.0, "loss": 0.1, **lag("0", 300, 0.03), **lag("2", 100, 0.1), **lag("9_or_more", 50, 0.4)},
)


def test_means_weigh_by_tokens() -> None:
    table = lag_table(MetricsLog(ROWS))
    assert table is not None and table.stale
    assert [row.lag for row in table.rows] == ["0", "2", "9_or_more"]
    first = table.rows[0]
    assert (first.tokens, first.abs_log_ratio) == (400, pytest.approx(0.025))
    assert first.log_ratio == pytest.approx(-0.025) and first.ess == pytest.approx(0.975)
    assert first.clip == 0.0 and table.rows[1].clip is None


def test_only_the_judged_steps_count() -> None:
    table = lag_table(MetricsLog(ROWS), (1, 1))
    assert table is not None and not table.stale and table.rows[0].tokens == 100
    assert table.text == "Mean |log-ratio| at lag 0 is 0.01 nats: engine mismatch alone."
    assert lag_table(MetricsLog(ROWS), (3, 9)) is None


def test_the_sentence_tells_mismatch_from_staleness() -> None:
    table = lag_table(MetricsLog(ROWS))
    assert table is not None
    assert "at lag 0 is 0.025 nats" in table.text and "At lag 9 or more it is 0.4000" in table.text
    stale = lag_table(MetricsLog(({"step": 1.0, **lag("3", 10, 0.1)},)))
    assert stale is not None and "cannot be told apart" in stale.text


def test_a_row_as_text() -> None:
    row = LagRow("9_or_more", 12, -0.5, 0.5, None, 0.125)
    assert row.cells == ("9 or more", "12", "-0.5000", "0.5000", "–", "12.5%")


def test_doctor_and_report_show_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    main(["doctor", str(tmp_path)])
    said = capsys.readouterr().out
    assert "by version lag" in said and "9 or more" in said and "beyond lag 0 is staleness" in " ".join(said.split())
    main(["doctor", str(tmp_path), "--json"])
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["by_lag"]
    assert [row["lag"] for row in found] == ["0", "2", "9_or_more"]
    page = write_report(tmp_path).read_text()
    assert "<h2>By version lag</h2>" in page and "<th scope=row>9 or more</th>" in page


def test_a_run_without_lags_has_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.1, "offpolicy/mismatch/kl_k3": 0.001}\n')
    main(["doctor", str(tmp_path)])
    assert "by version lag" not in capsys.readouterr().out
    assert "By version lag" not in write_report(tmp_path).read_text()
