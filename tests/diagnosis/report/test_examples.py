from __future__ import annotations

from typing import Any

import pytest

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
    html = examples.render_top_tokens(rollouts, _decode)
    first = "<td>5</td><td>0.5000</td><td>0.2500</td><td>-0.693</td><td>kept</td><td>0 / 0</td>"
    second = "<td>8</td><td>0.5000</td><td>0.7500</td><td>+0.405</td><td>dropped</td><td>1 / 0</td>"
    third = "<td>6</td><td>0.2500</td><td>0.2500</td><td>+0</td><td>kept</td><td>0 / 1</td>"
    assert 0 < html.index(first) < html.index(second) < html.index(third)


def test_context_marks_the_token_and_escapes_decoded_text(rollouts: RecordedRollouts) -> None:
    html = examples.render_top_tokens(rollouts, _decode)
    assert "<code><mark>&lt;5&gt;</mark>&lt;6&gt;&lt;7&gt;</code>" in html
    assert "<code>&lt;5&gt;<mark>&lt;6&gt;</mark>&lt;7&gt;</code>" in html


def test_without_a_tokenizer_ids_and_the_text_are_shown(rollouts: RecordedRollouts) -> None:
    html = examples.render_top_tokens(rollouts, None)
    assert '<code>5 <mark>6</mark> 7</code><br><span class="soft">five &amp; six</span>' in html


def test_long_contexts_are_cut_on_both_sides(
    write_run: Any, rollout_parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examples, "CONTEXT_TOKENS", 1)
    rollouts = read_rollouts(write_run([], rollout_parts))
    assert rollouts is not None
    html = examples.render_top_tokens(rollouts, None)
    assert "<code> <mark>5</mark> 6…</code>" in html
    assert "<code>5 <mark>6</mark> 7</code>" in html


def test_only_the_largest_are_listed(rollouts: RecordedRollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "TOP_TOKENS", 1)
    html = examples.render_top_tokens(rollouts, None)
    assert html.count('class="context"') == 1 and "<td>-0.693</td>" in html


def test_examples_come_from_the_first_and_last_step_with_their_fate(rollouts: RecordedRollouts) -> None:
    html = examples.render_examples(rollouts)
    assert html.count("<article>") == 3
    assert "step 0, reward 0.5, advantage 1, 2 tokens, kept" in html
    assert "step 1, reward –, advantage 1, 2 tokens, dropped" in html
    assert "<pre>1 + 1 = &lt;</pre>" in html and "<pre>five &amp; six</pre>" in html


def test_at_most_three_examples_an_end_spread_over_the_step(write_run: Any, rollout_parts: Any) -> None:
    rows = [{**rollout_parts[0][0], "completion": f"text {i}."} for i in range(9)]
    rollouts = read_rollouts(write_run([], [rows]))
    assert rollouts is not None
    html = examples.render_examples(rollouts)
    assert html.count("<article>") == 3
    assert all(f"text {i}." in html for i in (0, 4, 8))


def test_long_text_loses_its_middle() -> None:
    text = "a" * examples.MAX_TEXT + "b" * 500
    short = examples.shorten(text)
    assert short.startswith("aaa") and short.endswith("bbb") and "500 characters left out" in short
    assert examples.shorten("a" * examples.MAX_TEXT) == "a" * examples.MAX_TEXT
