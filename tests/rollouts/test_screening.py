"""The check of replies by hand-made ones: what is a fault, what stands in its place, what the ranks agree on."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks

from trl_offpolicy.engines.engine import Rollouts
from trl_offpolicy.rollouts.screening import LARGEST_LOGP, RolloutError, Screen, Unusable, fault_of

EOS, VOCABULARY = 1, 10
GOOD = ([5, 7, 1], [-0.5, -2.0, -0.1])
FAULTS: dict[str, tuple[list[int], list[float], str]] = {
    "empty": ([], [], "it is empty"),
    "negative id": ([5, -1], [-1.0, -1.0], "its token 1 is -1, outside the vocabulary of 10 ids"),
    "first id that is none": ([10], [-1.0], "its token 0 is 10, outside the vocabulary of 10 ids"),
    "positive": ([5, 7], [-1.0, 3.0], "the log-prob of its token 1 is +3, above 0"),
    "infinite": ([5], [math.inf], "the log-prob of its token 0 is +inf, above 0"),
    "too few log-probs": ([5, 7], [-1.0], "it has 1 log-probs for 2 tokens"),
}


def screen(mode: str = "drop") -> Screen:
    return Screen(mode, vocabulary=VOCABULARY, filler=EOS, decode=lambda ids: " ".join(f"w{i}" for i in ids))


def replies(**rows: tuple[list[int], list[float]]) -> dict[str, list[Any]]:
    return {"completion_ids": [ids for ids, _ in rows.values()], "logps": [logps for _, logps in rows.values()]}


def fill(row: int, reason: str) -> dict[str, Any]:
    return {"completion_ids": [EOS], "logps": [Unusable(reason)], "of_another": None}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str) -> None:
    ids, logps, expected = FAULTS[name]
    assert fault_of(ids, logps, vocabulary=VOCABULARY) == expected


@pytest.mark.parametrize(
    "reply",
    [GOOD, ([9], [0.0]), ([0], [LARGEST_LOGP]), ([5], [math.nan]), ([5], [None]), ([5], [-math.inf]), ([5, 6], None)],
    ids=str,
)
def test_what_is_no_fault(reply: Any) -> None:
    """A log-prob that is missing or not finite is the business of ``nonfinite``, rounding is none of anybody's."""
    assert fault_of(*reply, vocabulary=VOCABULARY) is None


def test_without_a_vocabulary_only_negative_ids_are_wrong() -> None:
    assert fault_of([10**6], [-1.0], vocabulary=None) is None
    assert fault_of([-3], [-1.0], vocabulary=None) == "its token 0 is -3, outside the vocabulary"


def test_the_mark_travels() -> None:
    mark = pickle.loads(pickle.dumps([-0.5, Unusable("it is empty")]))[1]
    assert math.isnan(mark) and mark.reason == "it is empty"
    assert torch.tensor([mark, -0.5]).isnan().tolist() == [True, False]


def test_a_filler_stands_for_a_dropped_reply() -> None:
    check = screen()
    given = replies(good=GOOD, bad=([5, 99], [-1.0, -1.0]), also=GOOD)
    found = check.replies(given, [[2], [3, 4], [2]], fill)
    assert found["completion_ids"] == [GOOD[0], [EOS], GOOD[0]] and found["logps"][0] == GOOD[1]
    assert given["completion_ids"][1] == [5, 99]  # the caller's list is not changed
    agreed = check.agree(found["completion_ids"], found["logps"])
    assert (agreed.rows, agreed.here, agreed.tokens, agreed.counts) == ((1,), (1,), 1, (1, 3, 1, 0))
    assert agreed.without_rewards(torch.tensor([[1.0], [2.0], [3.0]])).isnan().flatten().tolist() == [
        False,
        True,
        False,
    ]
    assert agreed.without_tokens(torch.ones(3, 2)).tolist() == [[1, 1], [0, 0], [1, 1]]
    logged = agreed.stats(torch.device("cpu")).compute()
    assert logged["offpolicy/rollout/unusable_fraction"] == pytest.approx(1 / 3)
    assert logged["offpolicy/rollout/retried_fraction"] == 0.0


def test_nothing_is_logged_while_nothing_is_bad() -> None:
    agreed = screen().agree([GOOD[0]], [GOOD[1]])
    assert agreed.rows == () and agreed.stats(torch.device("cpu")).compute() == {}


def test_retry_asks_for_the_bad_ones_alone() -> None:
    asked: list[list[int]] = []

    def again(rows: list[int]) -> dict[str, list[Any]]:
        asked.append(rows)
        answers = {1: GOOD, 2: ([], [])} if len(asked) == 1 else {2: GOOD}
        return replies(**{str(row): answers[row] for row in rows})

    check = screen("retry")
    found = check.replies(replies(a=GOOD, b=([], []), c=([], [])), [[2]] * 3, fill, again=again)
    assert asked == [[1, 2], [2]]
    assert found["completion_ids"] == [GOOD[0]] * 3
    agreed = check.agree(found["completion_ids"], found["logps"])
    assert agreed.rows == () and agreed.counts == (3, 3, 0, 3)
    assert check.agree([GOOD[0]], [GOOD[1]]).counts == (0, 1, 0, 0)  # the next batch counts from nothing


def test_retry_gives_up_after_two() -> None:
    asked: list[list[int]] = []

    def again(rows: list[int]) -> dict[str, list[Any]]:
        asked.append(rows)
        return replies(**{str(row): ([], []) for row in rows})

    check = screen("retry")
    found = check.replies(replies(a=GOOD, b=([], [])), [[2]] * 2, fill, again=again)
    assert asked == [[1], [1]] and check.agree(found["completion_ids"], found["logps"]).here == (1,)


def test_raise_names_the_request() -> None:
    check = screen("raise")
    found = check.replies(replies(a=GOOD, b=([5], [3.0])), [[2], [3, 4]], fill)
    with pytest.raises(
        RolloutError, match=r"1 of 2 replies.*row 1: the reply to 'w3 w4' cannot be used.*is \+3, above"
    ):
        check.agree(found["completion_ids"], found["logps"])


@pytest.mark.parametrize("mode", ["drop", "retry"])
def test_a_batch_of_nothing_ends_the_run(mode: str) -> None:
    check = screen(mode)
    found = check.replies(replies(a=([], []), b=([], [])), [[2]] * 2, fill)
    with pytest.raises(RolloutError, match=r"2 of 2 replies .*Nothing is left to learn from"):
        check.agree(found["completion_ids"], found["logps"])


@pytest.mark.parametrize("missing", [math.nan, None])
def test_no_log_prob_at_all_ends_the_run(missing: float | None) -> None:
    check = screen()
    with pytest.raises(RolloutError, match=r"gave none that is finite in a whole generation batch"):
        check.agree([[5, 6], [7]], [[missing, missing], [missing]])
    assert check.agree([[5, 6], [7]], [[missing, missing], [-1.0]]).rows == ()  # one is enough: nonfinite says the rest
    assert check.agree([[5, 6]], None).rows == ()  # an engine that is the trainer itself gives none


def test_placeholders_of_tools_are_no_log_probs() -> None:
    with pytest.raises(RolloutError, match=r"gave none that is finite"):
        screen().agree([[5, 6]], [[math.nan, 0.0]], [[1, 0]])


def rollouts(**columns: Any) -> Rollouts:
    made = {
        "prompt_ids": [[2], [2], [3]],
        "completion_ids": [[5], [6, 7], [8]],
        "sampling_per_token_logps": [[-1.0], [-1.0, -2.0], [-3.0]],
        "policy_versions": [[4], [4, 4], [4]],
        "finish_reasons": ["stop"] * 3,
    }
    return Rollouts(**{**made, **columns})


def test_every_field_of_a_filler_fits() -> None:
    bad = rollouts(
        completion_ids=[[5], [6, 99], [8]],
        routed_experts=[torch.zeros(1, 1, 1), torch.zeros(2, 1, 1), torch.zeros(1, 1, 1)],
        tool_mask=[[1], [1, 0], [1]],
        sampling_mask=[[[5]], [[6], [7]], [[8]]],
    )
    found = screen().rollouts(bad, [[2], [2], [3]])
    assert found.completion_ids == [[5], [EOS], [8]] and found.policy_versions[1] == [4]
    assert found.tool_mask is not None and found.tool_mask[1] == [1]
    assert found.routed_experts is not None and len(found.routed_experts[1]) == 1  # what is fed: the prompt
    assert found.finish_reasons[1] == "unusable"


def test_missing_completions_are_found_by_their_prompts() -> None:
    check = screen()
    found = check.rollouts(rollouts(), [[2], [2], [2], [3]])  # three of the first prompt were asked for
    assert found.completion_ids == [[5], [6, 7], [EOS], [8]]
    assert check.agree(found.completion_ids, found.sampling_per_token_logps).here == (2,)


def test_too_many_completions_end_the_run() -> None:
    check = screen()
    found = check.rollouts(rollouts(), [[2], [3]])
    with pytest.raises(RolloutError, match=r"3 completions where 2 were asked for"):
        check.agree(found.completion_ids, found.sampling_per_token_logps)


def test_without_log_probs_a_bad_reply_ends_the_run() -> None:
    """There is no place for the mark; an engine that gives none is the trainer itself, or the user's own."""
    check = screen()
    found = check.rollouts(rollouts(completion_ids=[[5], [], [8]], policy_versions=[[4], [], [4]],
                                    sampling_per_token_logps=None), [[2], [2], [3]])  # fmt: skip
    with pytest.raises(RolloutError, match=r"it is empty"):
        check.agree(found.completion_ids, None)


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match=r"on_bad_rollout must be one of"):
        screen("ignore")


# ---------------------------------------------------------------------------------------------------------- two ranks


def run(rank: int) -> dict[str, Any]:
    """Rank 1 alone sees what is bad; what each rank then does."""
    found: dict[str, Any] = {}
    for mode in ("drop", "raise"):
        check = screen(mode)
        given = replies(a=GOOD, b=([], []) if rank == 1 else GOOD)
        seen = check.replies(given, [[2]] * 2, fill)
        try:
            agreed = check.agree(seen["completion_ids"], seen["logps"])
            found[mode] = (agreed.rows, agreed.here, agreed.tokens)
        except RolloutError as error:
            found[mode] = str(error)
    asked: list[list[int]] = []

    def again(rows: list[int]) -> dict[str, list[Any]]:
        asked.append(rows)
        return replies(**{str(row): GOOD for row in rows})

    check = screen("retry")
    check.replies(replies(a=GOOD, b=([], []) if rank == 1 else GOOD), [[2]] * 2, fill, again=again, together=True)
    found["asked"] = asked
    check = screen()
    try:
        check.agree([GOOD[0]], [GOOD[1] if rank == 0 else [math.nan] * 3])
    except RolloutError as error:
        found["nan"] = str(error)
    return found


@pytest.mark.integration
def test_ranks_agree(tmp_path: Path) -> None:
    first, second = two_ranks.launch(__file__, run, tmp_path)
    assert first["drop"] == ((3,), (), 1) and second["drop"] == ((3,), (1,), 1)
    assert first["raise"] == second["raise"] and "Rank 1: row 1" in first["raise"]
    assert first["asked"] == [[]] and second["asked"] == [[1]]  # both called, as an engine that they share needs
    assert first["nan"] == second["nan"] and first["nan"].startswith("Rank 1: sampling_per_token_logps")


if __name__ == "__main__":
    two_ranks.join(run)


def test_what_only_the_first_reply_had_is_not_known_of_the_second() -> None:
    def again(rows: list[int]) -> dict[str, list[Any]]:
        return replies(a=GOOD)

    first = {**replies(a=GOOD, b=([], [])), "sampling_mask": [[5, 6, 7], [8]], "routed_experts": ["of a", "of b"]}
    found = screen("retry").replies(first, [[2]] * 2, fill, again=again)
    assert found["sampling_mask"] == [[5, 6, 7], None] and found["routed_experts"] == ["of a", None]
