from __future__ import annotations

from typing import Any

import pytest

from trl_offpolicy.diagnosis import write_report
from trl_offpolicy.diagnosis.report import examples
from trl_offpolicy.run_folder.rollouts import RecordedRollouts, read_rollouts


@pytest.fixture
def rollouts(write_run: Any, rollout_parts: Any) -> RecordedRollouts:
    found = read_rollouts(write_run([], rollout_parts))
    assert found is not None
    return found


def _decode(ids: list[int]) -> str:
    return "".join(f"<{i}>" for i in ids)


def test_top_tokens_are_ordered_with_both_probabilities(rollouts: RecordedRollouts) -> None:
    assert [token.cells for token in examples.top_tokens(rollouts, _decode)] == [
        ("5", "-0.6931 (0.5000)", "-1.386 (0.2500)", "-0.693", "kept", "1 / 0"),
        ("8", "-0.6931 (0.5000)", "-0.2877 (0.7500)", "+0.405", "dropped", "2 / 0"),
        ("6", "-1.386 (0.2500)", "-1.386 (0.2500)", "+0", "kept", "1 / 1"),
    ]


def test_context_holds_the_token_and_what_is_around_it(rollouts: RecordedRollouts) -> None:
    tokens = examples.top_tokens(rollouts, _decode)
    assert [token.context for token in tokens] == [("", "<5>", "<6><7>"), ("", "<8>", "<9>"), ("<5>", "<6>", "<7>")]
    assert [token.text for token in tokens] == ["", "", ""]


def test_without_a_tokenizer_ids_and_the_text_are_shown(rollouts: RecordedRollouts) -> None:
    last = examples.top_tokens(rollouts, None)[-1]
    assert (last.context, last.text) == (("5 ", "6", " 7"), "five & six")


def test_without_token_ids_the_text_alone_is_shown(write_run: Any, rollout_parts: Any) -> None:
    rollouts = read_rollouts(write_run([], [[{**rollout_parts[0][0], "completion_ids": None}]]))
    assert rollouts is not None
    first, *_ = examples.top_tokens(rollouts, _decode)
    assert (first.cells[0], first.context, first.text) == ("–", None, "five & six")


def test_the_report_marks_the_token_in_its_context(write_run: Any, rollout_parts: Any) -> None:
    run = write_run([{"step": 1, "reward": 1.0}], rollout_parts)
    with_text = write_report(run, decode=_decode).read_text(encoding="utf-8")
    assert "<code>&lt;5&gt;<mark>&lt;6&gt;</mark>&lt;7&gt;</code></td>" in with_text
    with_ids = write_report(run).read_text(encoding="utf-8")
    assert '<code>5 <mark>6</mark> 7</code><br><span class="soft">five &amp; six</span></td>' in with_ids


def test_long_contexts_are_cut_on_both_sides(rollouts: RecordedRollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "CONTEXT_TOKENS", 1)
    tokens = examples.top_tokens(rollouts, None)
    assert (tokens[0].context, tokens[2].context) == ((" ", "5", " 6…"), ("5 ", "6", " 7"))


def test_only_the_largest_are_listed(rollouts: RecordedRollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "TOP_TOKENS", 1)
    (only,) = examples.top_tokens(rollouts, None)
    assert "-0.693" in only.cells


def test_examples_come_from_the_first_and_last_step_with_their_fate(rollouts: RecordedRollouts) -> None:
    found = examples.example_completions(rollouts)
    assert len(found) == 3
    assert found[0] == ("step 1, reward 0.5, advantage 1, 2 tokens, kept", "1 + 1 = <", "five & six")
    assert found[2].facts == "step 2, reward –, advantage 1, 2 tokens, dropped"


def test_at_most_three_examples_an_end_spread_over_the_step(write_run: Any, rollout_parts: Any) -> None:
    rows = [{**rollout_parts[0][0], "completion": f"text {i}."} for i in range(9)]
    rollouts = read_rollouts(write_run([], [rows]))
    assert rollouts is not None
    assert [one.completion for one in examples.example_completions(rollouts)] == ["text 0.", "text 4.", "text 8."]


def test_long_text_loses_its_middle() -> None:
    text = "a" * examples.MAX_TEXT + "b" * 500
    short = examples.shorten(text)
    assert short.startswith("aaa") and short.endswith("bbb") and "500 characters left out" in short
    assert examples.shorten("a" * examples.MAX_TEXT) == "a" * examples.MAX_TEXT
