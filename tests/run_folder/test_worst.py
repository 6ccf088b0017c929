"""The responses on which engine and trainer disagree most: which are kept, what is kept of them, and how little."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from trl_offpolicy.diagnosis import write_report
from trl_offpolicy.diagnosis.report.examples import shade, worst_responses
from trl_offpolicy.run_folder import layout
from trl_offpolicy.run_folder.worst import MOST_RESPONSES, MOST_TOKENS, WorstResponses, disagreement, read_worst
from trl_offpolicy.run_folder.writer import RolloutRecorder, prepare_run_folder

WORDS = {4: "four", 5: " five", 6: "</pre>", 7: " seven"}


def decode(ids: list[int]) -> str:
    """A tokenizer that drops the space before the first word, as sentencepiece does."""
    return "".join(WORDS.get(one, f" {one}") for one in ids).lstrip()


def row(gaps: list[float], step: int = 0, **more: Any) -> dict[str, Any]:
    length = len(gaps)
    return {
        "step": step,
        "reward": 0.5,
        "advantage": -1.0,
        "prompt": "say four five",
        "completion_ids": [4 + at % 4 for at in range(length)],
        "completion_mask": [True] * length,
        "sampling_per_token_logps": [-1.0] * length,
        "old_per_token_logps": [-1.0 + gap for gap in gaps],
        "weights": [1.0] * length,
        "keep_mask": [True] * length,
        **more,
    }


def kept(folder: Path) -> list[float]:
    return [one["mean_abs_log_ratio"] for one in read_worst(folder / layout.WORST_FOLDER)]


def test_disagreement_is_a_mean_over_trainable_tokens_with_both_log_probs() -> None:
    assert disagreement(row([0.5, -1.5])) == pytest.approx(1.0)
    assert disagreement(row([0.5, 9.0], completion_mask=[True, False])) == pytest.approx(0.5)
    assert disagreement(row([0.5, math.nan])) == pytest.approx(0.5)
    assert disagreement(row([0.5], sampling_per_token_logps=None)) == 0.0


def test_the_worst_of_the_run_are_kept_and_no_more(tmp_path: Path) -> None:
    worst = WorstResponses(tmp_path, decode, rank=0)
    for step in range(20):
        worst.add([row([step / 10], step), row([-0.001], step)])
    worst.add([row([0.0])])
    assert kept(tmp_path) == pytest.approx([1.9 - at / 10 for at in range(MOST_RESPONSES)])
    again = WorstResponses(tmp_path, decode, rank=0)  # a resumed run
    again.add([row([5.0], 21)])
    WorstResponses(tmp_path, decode, rank=1).add([row([1.85])])
    assert kept(tmp_path)[:4] == pytest.approx([5.0, 1.9, 1.85, 1.8]) and len(kept(tmp_path)) == MOST_RESPONSES


def test_a_long_response_is_cut_around_its_worst_token(tmp_path: Path) -> None:
    gaps = [0.01] * 5000
    gaps[3000] = -8.0
    WorstResponses(tmp_path, decode, rank=0).add([row(gaps)] * 20)
    (path,) = (tmp_path / layout.WORST_FOLDER).iterdir()
    assert path.stat().st_size < MOST_RESPONSES * MOST_TOKENS * 60
    first = json.loads(path.read_text())[0]
    assert (first["tokens"], len(first["text"]), first["start"]) == (5000, MOST_TOKENS, 3000 - MOST_TOKENS // 2)
    assert first["old_per_token_logps"][3000 - first["start"]] == -9.0


def test_texts_of_tokens_join_to_the_response(tmp_path: Path) -> None:
    WorstResponses(tmp_path, decode, rank=0).add([row([0.1] * 9)])
    text = read_worst(tmp_path / layout.WORST_FOLDER)[0]["text"]
    assert "".join(text) == decode(row([0.1] * 9)["completion_ids"]) and text[1] == " five"


def test_values_that_are_not_finite_are_null(tmp_path: Path) -> None:
    WorstResponses(tmp_path, decode, rank=0).add([row([1.0, math.nan], reward=math.nan)])
    text = (tmp_path / layout.WORST_FOLDER / layout.worst_file(0)).read_text()
    (one,) = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert one["reward"] is None and one["old_per_token_logps"] == [0.0, None]


def test_a_resumed_run_forgets_what_it_samples_again_and_a_new_one_all(tmp_path: Path) -> None:
    WorstResponses(tmp_path, decode, rank=0).add([row([0.5], 0), row([0.4], 1), row([0.3], 2)])
    prepare_run_folder(tmp_path, resumed_step=1)
    assert kept(tmp_path) == [0.5]
    prepare_run_folder(tmp_path, resumed_step=0)
    assert kept(tmp_path) == [] and len(list((tmp_path / "_previous").rglob(layout.WORST_FILES))) == 1


def test_the_recorder_keeps_them_when_it_writes_and_not_before(tmp_path: Path) -> None:
    recorder = RolloutRecorder(tmp_path, decode, rank=0)
    ids, ones = torch.tensor([[4, 5, 6]]), torch.ones(1, 3, dtype=torch.bool)
    recorder.add(
        3, prompt_ids=ids, prompt_mask=ones, completion_ids=ids, attention_mask=ones, completion_mask=ones,
        sampling_per_token_logps=torch.full((1, 3), -1.0), old_per_token_logps=torch.full((1, 3), -1.5),
    )  # fmt: skip
    assert kept(tmp_path) == []
    recorder.flush()
    (one,) = read_worst(tmp_path / layout.WORST_FOLDER)
    assert (one["step"], one["mean_abs_log_ratio"], one["prompt"]) == (3, 0.5, "four five</pre>")


def test_the_page_shows_each_token_with_both_log_probs(write_run: Any) -> None:
    run = write_run([{"step": 1, "reward": 0.5}])
    mask, keep = [True, True, True, False], [True, True, False, True]
    WorstResponses(run, decode, rank=0).add([row([0.01, -0.5, 3.0, 0.0], completion_mask=mask, keep_mask=keep)])
    (one,) = worst_responses(run, None, None)
    assert one.facts.startswith("mean |log-ratio| 1.1700 nats, step 1, reward 0.5, advantage -1, 4 tokens")
    assert [span.shade for span in one.spans] == ["", "less2", "more4 dropped", "other"]
    tip = "token 1: log-prob sampler -1, trainer -1.5, log-ratio -0.5, weight 1"
    assert one.spans[1] == (" five", "less2", tip)
    html = write_report(run).read_text(encoding="utf-8")
    assert f'<span class="less2" data-tip="{tip}"> five</span>' in html
    assert ">&lt;/pre&gt;</span>" in html and "<h2>Worst responses</h2>" in html


def test_without_kept_ones_the_page_takes_them_from_the_rollouts(write_run: Any) -> None:
    run = write_run([{"step": 1, "reward": 0.5}], [[row([0.1]), row([-0.4, 0.6]), row([0.0])]])
    from trl_offpolicy.run_folder.rollouts import read_rollouts

    rollouts = read_rollouts(run)
    found = worst_responses(run, rollouts, None)
    assert ["".join(span.text for span in one.spans) for one in found] == ["4 5 ", "4 "]  # ids: no tokenizer
    assert "".join(span.text for span in worst_responses(run, rollouts, decode)[0].spans) == "four five"


@pytest.mark.parametrize(
    ("log_ratio", "name"), [(0.04, ""), (-0.06, "less1"), (0.3, "more2"), (-0.8, "less3"), (2.1, "more4")]
)
def test_colours_say_direction_and_size(log_ratio: float, name: str) -> None:
    assert shade(log_ratio) == name


def test_a_file_that_is_none_is_left_out_and_named(tmp_path: Path) -> None:
    for number, text in enumerate(("[", '[{"step": 1}]', "3")):
        (tmp_path / f"rank-{number:04d}.json").write_text(text)
    with pytest.warns(UserWarning, match=r"rank-000\d.json cannot be read and is left out") as told:
        assert read_worst(tmp_path) == []
    assert len(told) == 3
