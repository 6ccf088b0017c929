"""Whether the ids that are trained on are the engine's: every way in which they can differ is found at its token."""

import logging
from types import SimpleNamespace

import pytest
import torch

from trl_offpolicy.engines.engine import Call
from trl_offpolicy.rollouts import token_ids
from trl_offpolicy.rollouts.token_ids import Drift, TokenIdCheck, drift_of_ids, first_drift, is_canonical, runs

PROMPT = [1, 2]
ROW = [10, 11, 90, 91, 12, 13]  # two turns with tool output between
MASK = [True, True, False, False, True, True]
CALLS = [Call([1, 2], [10, 11]), Call([1, 2, 10, 11, 90, 91], [12, 13])]


def test_runs():
    assert runs([]) == [] and runs([False, False]) == []
    assert runs(MASK) == [(0, 2), (4, 6)]
    assert runs([False, True]) == [(1, 2)]


def test_what_the_engine_sampled_is_no_drift():
    assert first_drift(PROMPT, ROW, MASK, CALLS) is None
    assert first_drift(PROMPT, [], [], CALLS) is None


@pytest.mark.parametrize(
    ("position", "drift"),
    [
        (0, Drift(0, 77, 10)),
        (1, Drift(1, 77, 11)),
        (4, Drift(4, 77, 12)),
        (5, Drift(5, 77, 13)),
        (2, Drift(2, 77, 90)),  # the tool output that the engine saw was another
    ],
)
def test_another_id_is_named_with_the_engines(position, drift):
    row = [77 if i == position else token for i, token in enumerate(ROW)]
    assert first_drift(PROMPT, row, MASK, CALLS) == drift


def test_another_prompt_is_counted_from_its_end():
    assert first_drift([1, 3], ROW, MASK, CALLS) == Drift(-1, 3, 2)
    assert first_drift([1, 2, 3], ROW, MASK, CALLS) == Drift(-1, 3, None)  # the prompt ended there


def test_merged_and_split_tokens():
    assert first_drift(PROMPT, [10, 11, 14], [True] * 3, CALLS[:1]) == Drift(2, 14, None)  # more than was sampled
    assert first_drift(PROMPT, [55], [True], CALLS[:1]) == Drift(0, 55, 10)  # two ids became one
    assert first_drift(PROMPT, [10, 90], [True, False], CALLS[:1]) == Drift(1, 90, 11)  # one is missing in the middle


def test_a_completion_that_was_cut_at_its_end_is_no_drift():
    assert first_drift(PROMPT, ROW[:5], MASK[:5], CALLS) is None
    assert first_drift(PROMPT, [10], [True], CALLS) is None


def test_an_answer_in_parts_and_several_answers_to_one_prompt():
    parts = [Call([1, 2], [10]), Call([1, 2, 10], [11])]
    assert first_drift(PROMPT, [10, 11], [True, True], parts) is None
    group = [Call([1, 2], [7]), Call([1, 2], [10, 12]), Call([1, 2], [10, 11])]
    assert first_drift(PROMPT, [10, 11], [True, True], group) is None
    assert first_drift(PROMPT, [10, 13], [True, True], group) == Drift(1, 13, 12)


def test_without_calls_everything_is_unknown():
    assert first_drift(PROMPT, [10], [True], []) == Drift(-2, 1, None)


def test_ids_alone():
    assert drift_of_ids(ROW, MASK, [10, 11, 12, 13]) is None
    assert drift_of_ids(ROW, MASK, [10, 11, 12, 13, 14]) is None  # cut at the end
    assert drift_of_ids(ROW, MASK, [10, 11, 12]) == Drift(5, 13, None)
    assert drift_of_ids(ROW, MASK, [10, 8, 12, 13]) == Drift(1, 11, 8)
    assert drift_of_ids([10, 90], [True, False], [10, 11]) == Drift(2, None, 11)


def test_canonical_goes_turn_by_turn():
    seen = []

    def again(ids):
        seen.append(ids)
        return [99] if ids == [12, 13] else ids

    assert not is_canonical(ROW, MASK, again)
    assert seen == [[10, 11], [12, 13]]
    assert is_canonical(ROW, MASK, list)


# ------------------------------------------------------------------------------------------------- beside a trainer


class Letters:
    """``0`` is "a", ``1`` is "b", ``2`` is "ab": encoding prefers the pair."""

    def decode(self, ids, **_):
        return "".join(("a", "b", "ab")[i] for i in ids)

    def __call__(self, text, **_):
        ids = []
        while text:
            pair = text.startswith("ab")
            ids, text = [*ids, 2 if pair else "ab".index(text[0])], text[2 if pair else 1 :]
        return {"input_ids": ids}


def batch(rows, tools=None):
    length = max(map(len, rows))
    output = {
        "prompt_ids": torch.tensor([[0, 1]] * len(rows)),
        "prompt_mask": torch.tensor([[0, 1]] * len(rows)),  # left padded: the prompt is [1]
        "completion_ids": torch.tensor([row + [0] * (length - len(row)) for row in rows]),
        "completion_mask": torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows]),
    }
    return output if tools is None else {**output, "tool_mask": torch.tensor(tools)}


def trainer(calls=None, rollout_func=None):
    engine = None if calls is None else SimpleNamespace(calls=calls)
    return SimpleNamespace(_tokenizer=Letters(), vllm_generation=engine, rollout_func=rollout_func)


def values(stats):
    return {key.removeprefix("offpolicy/rollout/"): value for key, value in stats.compute().items()}


def test_both_shares():
    calls = [Call([1], [2, 0]), Call([1], [0, 1])]
    check = TokenIdCheck(trainer(calls), "warn")

    found = values(check(batch([[2, 0], [0, 1], [0, 1], [2, 2]])))

    assert found == {"noncanonical_fraction": 0.5, "retokenised_fraction": 0.25}  # "a" "b" is "ab" when read again
    assert calls == []  # the records of a generation batch are for that one only


def test_what_the_engine_did_is_not_known_for_a_plain_rollout_func():
    assert values(TokenIdCheck(trainer(), "warn")(batch([[2]]))) == {"noncanonical_fraction": 0.0}


def test_a_rollout_func_can_say_what_was_sampled():
    said = {"prompt_ids": [[1]], "completion_ids": [[2]], "logprobs": [[0.0]], "sampled_ids": [[0, 1]]}
    owner = trainer(rollout_func=lambda prompts, trainer: said)
    check = TokenIdCheck(owner, "raise")

    assert "sampled_ids" not in owner.rollout_func(["x"], owner)
    with pytest.raises(ValueError, match=r"row 0, token 0 of the completion.*holds 2 \('ab'\).*had 0 \('a'\)"):
        check(batch([[2]]))
    assert values(check(batch([[2]]))) == {"noncanonical_fraction": 0.0}  # said once, for one batch


def test_it_warns_once_and_names_the_first_row(caplog):
    owner = trainer([])
    check = TokenIdCheck(owner, "warn")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            owner.vllm_generation.calls += [Call([1], [2]), Call([1], [0])]
            check(batch([[2], [1]]))
    (record,) = caplog.records
    assert "row 1, token 0" in record.message and "in 1 of the rows" in record.message


def test_off_and_images_look_at_nothing_and_keep_nothing():
    calls = [Call([1], [0])]
    assert TokenIdCheck(trainer(calls), "off")(batch([[2]])).compute() == {} and calls == []
    calls.append(Call([1], [0]))
    images = {**batch([[2]]), "pixel_values": torch.zeros(1)}
    seen = TokenIdCheck(trainer(calls), "raise")(images)
    assert seen.compute() == {} and calls == []

    # A rank without images adds the same groups up, or it would wait for this one forever.
    of_text = TokenIdCheck(trainer([Call([1], [2])]), "raise")(batch([[2]]))
    assert list(seen.groups) == list(of_text.groups)


def test_at_most_eight_rows_are_looked_at():
    rows = [[2]] * 15 + [[1]]
    check = TokenIdCheck(trainer([Call([1], [2])] * 16), "warn")
    (group,) = [g for name, g in check(batch(rows)).groups.items() if name.endswith("ids")]
    assert group.moments.sums.tolist() == [8.0, 0.0]  # every second row; the last is not among them


def test_of_long_rows_fewer_are_looked_at(monkeypatch):
    monkeypatch.setattr(token_ids, "TOKENS", 5)
    for row, looked_at in (([2], 5.0), ([2, 2], 2.0), ([2] * 9, 1.0)):
        check = TokenIdCheck(trainer([Call([1], row)]), "warn")
        (group,) = [g for name, g in check(batch([row] * 10)).groups.items() if name.endswith("ids")]
        assert group.moments.sums.tolist() == [looked_at, 0.0]


def test_other_rows_are_looked_at_in_the_next_batch(monkeypatch):
    monkeypatch.setattr(token_ids, "TOKENS", 4)
    check = TokenIdCheck(trainer([]), "warn")
    seen = []
    for _ in range(4):  # two of four rows at a time, one of which is not the engine's
        check.trainer.vllm_generation.calls.extend(Call([1], [2, 2]) for _ in range(4))
        seen.append(values(check(batch([[2, 2], [2, 1], [2, 2], [2, 2]])))["retokenised_fraction"])
    assert seen == [0.0, 0.5, 0.0, 0.5]


def test_tool_tokens_are_not_compared_but_their_context_is():
    calls = [Call([1], [2]), Call([1, 2, 0], [1])]
    found = TokenIdCheck(trainer(list(calls)), "raise")(batch([[2, 0, 1]], tools=[[1, 0, 1]]))
    assert values(found)["retokenised_fraction"] == 0.0
    with pytest.raises(ValueError, match="row 0, token 1"):
        TokenIdCheck(trainer(list(calls)), "raise")(batch([[2, 1, 1]], tools=[[1, 0, 1]]))


def test_a_row_that_left_the_loss_has_no_drift() -> None:
    assert drift_of_ids([], [], [12, 13, 14]) is None
    assert drift_of_ids([5, 6], [False, False], [12]) is None
