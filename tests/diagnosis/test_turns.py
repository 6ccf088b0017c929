"""The table by turn, from recorded rollouts: numbers by hand, in the doctor's words, as JSON and on the page."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from trl_offpolicy.cli.commands import main
from trl_offpolicy.diagnosis.report.report import write_report
from trl_offpolicy.diagnosis.turns import MOST_TURNS, turn_table
from trl_offpolicy.run_folder.rollouts import read_rollouts

METRICS = [{"step": step, "reward": 0.5, "offpolicy/mismatch/kl_k3": 0.001} for step in (1, 2)]


def response(mask: str, gaps: list[float], *, kept: bool = True) -> dict[str, Any]:
    """``mask`` has a 1 for each token of the policy and a 0 for each of a tool; ``gaps`` are old - sampling."""
    inside = [one == "1" for one in mask]
    return {
        "step": 0,
        "completion": "text",
        "completion_mask": inside,
        "sampling_per_token_logps": [-1.0] * len(mask),
        "old_per_token_logps": [-1.0 + gap for gap in gaps],
        "keep_mask": [kept] * len(mask),
    }


ROWS = [
    response("0110010", [9.0, 0.1, -0.1, 9.0, 9.0, math.log(2), 9.0]),  # a tool's token first: its turns are 1 and 2
    response("", []),
    response("1101", [0.0, 0.2, 9.0, math.log(0.5)], kept=False),
    response("111", [0.0, 0.0, 0.0]),
]


def test_turns_begin_where_the_policy_writes_again(write_run: Any) -> None:
    rollouts = read_rollouts(write_run(METRICS, [ROWS, ROWS[:1]]))
    assert rollouts is not None and rollouts.turn is not None
    assert rollouts.turn.tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1]


def test_the_numbers_of_a_turn(write_run: Any) -> None:
    table = turn_table(read_rollouts(write_run(METRICS, [ROWS])))
    assert table is not None and [row.turn for row in table.rows] == ["1", "2"]
    first, second = table.rows
    assert (first.responses, first.tokens, second.responses, second.tokens) == (3, 7, 2, 2)
    assert first.log_ratio == pytest.approx(0.2 / 7, rel=1e-5)
    assert first.abs_log_ratio == pytest.approx(0.4 / 7, rel=1e-5) and first.dropped == pytest.approx(2 / 7)
    assert second.log_ratio == pytest.approx(0.0, abs=1e-6) and second.dropped == 0.5
    assert second.abs_log_ratio == pytest.approx(math.log(2), rel=1e-5)
    assert second.kl_k3 == pytest.approx(2.5 / 2 - 1, rel=1e-5)  # ratios 2 and 1/2
    assert second.ess == pytest.approx(2.5**2 / (2 * 4.25), rel=1e-5)
    assert table.text == "Mean |log-ratio| is 0.0571 nats in turn 1 and at most 0.6931 after it (turn 2)."


def test_late_turns_share_a_row_and_single_turns_have_no_table(write_run: Any) -> None:
    table = turn_table(read_rollouts(write_run(METRICS, [[response("10" * 12, [0.1] * 24)]])))
    assert table is not None and len(table.rows) == MOST_TURNS + 1
    assert (table.rows[-1].turn, table.rows[-1].tokens) == ("9 or more", 12 - MOST_TURNS)
    assert turn_table(read_rollouts(write_run(METRICS, [ROWS[3:]]))) is None and turn_table(None) is None


def test_doctor_and_report_show_it(write_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(METRICS, [ROWS])
    assert main(["doctor", str(run)]) == 0
    assert "by turn, over all recorded tokens" in capsys.readouterr().out
    assert main(["doctor", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["by_turn"]
    assert [row["turn"] for row in found] == ["1", "2"] and found[1]["tokens"] == 2
    html = write_report(run).read_text(encoding="utf-8")
    assert "<h2>By turn</h2>" in html and '<th scope=row>2</th><td class="num">2</td>' in html
