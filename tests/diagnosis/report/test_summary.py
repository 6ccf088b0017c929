from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.console import Console

from trl_offpolicy.diagnosis.report.summary import QUANTITIES, format_with_interval, print_summary, summarize_run


def _rows(key: str, values: list[float | None]) -> list[dict[str, Any]]:
    return [{"step": 10 + i, "reward": 0.0, key: value} for i, value in enumerate(values)]


def test_quarters_round_up_and_take_the_ends(write_run: Any) -> None:
    summary = summarize_run(write_run(_rows("offpolicy/mismatch/kl_k1", [1.0, 2.0, 4.0, 8.0, -16.0])))
    row = summary.find("KL k1", "before")
    assert row is not None
    assert (row.first, row.last) == (1.5, -4.0)
    assert row.whole == pytest.approx(-0.2, abs=1e-12)
    assert (summary.first_steps, summary.last_steps, summary.all_steps) == ((10, 11), (13, 14), (10, 14))


def test_nonfinite_values_leave_the_means_and_are_counted(write_run: Any) -> None:
    values = [math.nan, 2.0, None, 6.0]
    summary = summarize_run(write_run(_rows("offpolicy/kept/kl_k3", values)))
    row = summary.find("KL k3", "after")
    assert row is not None
    assert (row.first, row.last, row.whole, row.nonfinite) == (None, 6.0, 4.0, 2)
    assert summary.nonfinite == 2


def test_each_quantity_reads_its_own_key(write_run: Any) -> None:
    keys = [quantity.keys[0].format(group="mismatch") for quantity in QUANTITIES]
    values = {key: float(index + 1) for index, key in enumerate(keys)}
    summary = summarize_run(write_run([{"step": 1, **values}]))
    assert [row.whole for row in summary.rows] == list(values.values())
    assert len(set(keys)) == len(keys)
    assert summary.whole("KL k3", "before") == values["offpolicy/mismatch/kl_k3"]
    assert summary.whole("ESS (token)", "before") == values["offpolicy/weight/ess_token"]
    assert summary.whole("ESS (token)", "after") == values["offpolicy/weight_applied/ess_token"]
    assert summary.whole("dropped sequences") == values["offpolicy/keep/dropped_sequence_fraction"]
    assert summary.whole("truncated weights") == values["offpolicy/weight/truncated_fraction"]


def test_missing_metrics_stay_in_the_table_and_optional_ones_do_not(write_run: Any) -> None:
    summary = summarize_run(write_run([{"step": 1, "reward": 0.5}]))
    assert summary.whole("chi2 (sequence)", "after") is None
    assert summary.find("chi2 (sequence)", "after") is not None
    assert summary.find("version lag") is None


def test_total_ratio_stands_in_where_mismatch_was_not_logged(write_run: Any) -> None:
    summary = summarize_run(write_run(_rows("offpolicy/total/kl_k1", [0.25])))
    assert summary.whole("KL k1", "before") == 0.25
    assert summary.ratio_group == "total"


def test_completion_length_falls_back_to_the_kits_own_key(write_run: Any) -> None:
    key = "offpolicy/rollout/response_length_mean"
    assert summarize_run(write_run(_rows(key, [7.0]))).whole("completion length") == 7.0
    both = [{"step": 1, key: 7.0, "completions/mean_length": 8.0}]
    assert summarize_run(write_run(both)).whole("completion length") == 8.0


def test_printed_table_fits_100_columns_and_states_unit_and_direction(write_run: Any) -> None:
    metrics = {"step": 1000, "offpolicy/mismatch/kl_k1": -0.000317, "offpolicy/kept/kl_k1": 0.25}
    run = write_run([metrics, {**metrics, "step": 2000, "offpolicy/kept/kl_k3": None}, '{"step'])
    with pytest.warns(UserWarning, match="skipped 1 line"):
        summary = summarize_run(run)
    console = Console(file=io.StringIO(), width=100, color_system=None)
    print_summary(summary, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text.replace(str(run), "")
    assert "KL k1, nats/token" in text and "-0.000317" in text and "0.2500" in text
    words = " ".join(text.split())
    assert "KL(sampler||trainer) in nats per token" in words
    assert "1 non-finite value(s)" in words and "1 unreadable line(s)" in words
    assert "steps 1000-2000" in words


def test_the_interval_of_a_run_is_that_of_a_mean_of_independent_steps(write_run: Any) -> None:
    rows = _rows("offpolicy/mismatch/kl_k3", [1.0, 2.0, 3.0, 2.0])
    for row, width in zip(rows, (0.3, 0.4, 0.0, 1.2), strict=True):
        row["offpolicy/mismatch/kl_k3_ci95"] = width
    row = summarize_run(write_run(rows)).find("KL k3", "before")
    assert row is not None and row.half_width == pytest.approx(1.3 / 4, rel=1e-12)
    assert format_with_interval(row) == "2.0000 ± 0.3"
    del rows[1]["offpolicy/mismatch/kl_k3_ci95"]
    assert summarize_run(write_run(rows)).find("KL k3", "before").half_width is None  # type: ignore[union-attr]
