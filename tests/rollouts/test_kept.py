"""Kept ids travel with their rows and are what the trainer renormalises over, in whatever order rows are scored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rollouts.test_micro_batches import LENGTH, ROWS, generation_batch
from tiny_models import PAD, tiny_model
from torch import Tensor

from trl_offpolicy.engines.engine import Rollouts, Sampling
from trl_offpolicy.functional.truncated_sampling import KeptIds
from trl_offpolicy.rollouts.ahead.parts import Part, ResponseInParts
from trl_offpolicy.rollouts.batches import in_other_batches
from trl_offpolicy.rollouts.compact import CompactScoring
from trl_offpolicy.rollouts.kept import KEY, checked, collated, kept_stats, placed
from trl_offpolicy.rollouts.micro_batches import Splitting, split_rows
from trl_offpolicy.rollouts.replay import ReplayGroup, Response, pad_groups
from trl_offpolicy.rollouts.replay.mixing import fresh_groups
from trl_offpolicy.rollouts.scoring import Scorer
from trl_offpolicy.rollouts.shared_prefix import SharedPrefix

PROMPTS = [[5, 6, 7], [5, 6, 7], [8], [9, 10]]
COMPLETIONS = [[11, 12], [13, 14, 15, 16], [17], [18, 19, 20]]


def rows() -> dict[str, Any]:
    """Four ragged rows; each token's kept set has itself and some other ids, of another number at each place."""
    width, length = 3, 4
    sets = [[[t, *range(30 + 5 * i, 30 + 5 * i + j)] for j, t in enumerate(row)] for i, row in enumerate(COMPLETIONS)]
    return {
        "prompt_ids": torch.tensor([[PAD] * (width - len(p)) + p for p in PROMPTS]),
        "prompt_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS]),
        "completion_ids": torch.tensor([c + [PAD] * (length - len(c)) for c in COMPLETIONS]),
        "completion_mask": torch.tensor([[1] * len(c) + [0] * (length - len(c)) for c in COMPLETIONS]),
        **collated([KeptIds.of(row) for row in sets], COMPLETIONS),
    }


def by_hand(model: Any, kept: list[KeptIds], temperature: float) -> Tensor:
    """Log-softmax over the listed ids, of each row without padding; rows one after the other."""
    found = []
    for prompt, completion, of_row in zip(PROMPTS, COMPLETIONS, kept, strict=True):
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
        for place, listed in enumerate(of_row.tolist()):
            found.append(logits[place][listed].log_softmax(-1)[listed.index(completion[place])])
    return torch.stack(found)


COMPACT = {
    "as they are": None,
    "sorted and cut": CompactScoring(trim=True, shared=SharedPrefix(False, counted=True)),
    "prompts once": CompactScoring(trim=True, shared=SharedPrefix(True, counted=True)),
}


@pytest.mark.parametrize("size", [None, 1, 2, 3])
@pytest.mark.parametrize("compact", COMPACT)
def test_scores_are_log_softmax_over_the_listed_ids(compact: str, size: int | None) -> None:
    model, batch = tiny_model().eval(), rows()
    scorer = Scorer(Sampling(max_tokens=4, temperature=0.7, top_p=0.5), compact=COMPACT[compact])
    scores, mask = scorer(model, batch, batch_size=size), batch["completion_mask"].bool()
    torch.testing.assert_close(scores.logps[mask], by_hand(model, batch[KEY], 0.7), rtol=1e-4, atol=2e-5)
    assert not scores.outside[mask].any()
    gradient = torch.autograd.grad(scores.logps[mask].sum(), model.lm_head.weight)[0]
    expected = torch.autograd.grad(by_hand(model, batch[KEY], 0.7).sum(), model.lm_head.weight)[0]
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4)
    other = {**batch, KEY: [batch[KEY][0], batch[KEY][1], batch[KEY][2], KeptIds.of([[18], [19], [20]])]}
    assert float(scorer(model, other, batch_size=size).logps[3, :3].abs().max()) == 0.0  # one token is left


def test_a_reference_ignores_them_and_an_unknown_position_is_cut_by_the_rule() -> None:
    model, batch = tiny_model().eval(), rows()
    plain = {name: value for name, value in batch.items() if name != KEY}
    cut = Sampling(max_tokens=4, top_k=7)
    whole = Scorer(cut, truncated=False)
    torch.testing.assert_close(whole(model, batch).logps, whole(model, plain).logps)
    batch[KEY][1] = KeptIds.of([[], [], [15], []])
    found, ruled = Scorer(cut)(model, batch).logps, Scorer(cut)(model, plain).logps
    torch.testing.assert_close(found[1, [0, 1, 3]], ruled[1, [0, 1, 3]])
    assert float(found[1, 2]) == 0.0 and float(ruled[1, 2]) < -0.1


@pytest.mark.parametrize("whole_groups", [False, "auto", True])
def test_they_follow_their_row_when_a_generation_batch_is_sorted_and_split(whole_groups: Any) -> None:
    batch = generation_batch()
    lengths = batch["completion_mask"].sum(1).tolist()
    batch[KEY] = [  # every id says its row and its place
        KeptIds.of([[int(number) + place] for place in range(length)])
        for number, length in zip(batch["rewards"].tolist(), lengths, strict=True)
    ]
    seen = 0
    for part in split_rows(batch, 4, Splitting(4, whole_groups=whole_groups)):
        at = placed(part[KEY], part["completion_ids"].shape[1]).at(part["completion_mask"].bool().flatten())
        assert at.ids.tolist() == part["completion_ids"][part["completion_mask"].bool()].tolist()
        seen += len(at)
    assert seen == sum(lengths) and len(batch["rewards"]) == ROWS


def test_placed_cuts_and_pads_to_the_width() -> None:
    kept = placed([KeptIds.of([[4], [5, 6]]), KeptIds.of([[7], [8], [9, 1]]), KeptIds.of([])], 2)
    assert kept.tolist() == [[4], [5, 6], [7], [8], [0], [0]]


def test_a_doubled_row_has_them_twice() -> None:
    one = {name: value[:1] for name, value in rows().items()}
    doubled, _ = in_other_batches(one)
    assert [kept.tolist() for kept in doubled[KEY]] == [one[KEY][0].tolist()] * 2


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([[7]], r"^sampling_mask must have 2 positions for completion 3, but got 1\.$"),
        ([[7], [5, 9]], r"token 1 of completion 3 is 8, and the engine kept 2 others there"),
        ([[8], [7]], r"token 0 of completion 3 is 7, and the engine kept 1 others there"),
    ],
)
def test_masks_of_other_tokens_are_an_error(kept: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked(KeptIds.of(kept), [7, 8], 3)


def test_what_is_not_reported_is_unknown() -> None:
    assert checked(None, [7, 8], 0).tolist() == [[], []]
    assert checked(KeptIds.of([[], [8, 9]]), [7, 8], 0).unknown.tolist() == [0]
    assert collated(None, [[7]]) == {}
    found = collated([None, KeptIds.of([[7]])], [[5, 6], [7]])[KEY]
    assert [kept.tolist() for kept in found] == [[[], []], [[7]]]


def test_rollouts_take_lists_of_ids_and_refuse_another_number() -> None:
    fields: dict[str, Any] = {
        "prompt_ids": [[1], [1]], "completion_ids": [[5, 6], [7]], "sampling_per_token_logps": None,
        "policy_versions": [[0, 0], [0]], "finish_reasons": ["stop", "stop"],
    }  # fmt: skip
    found = Rollouts(**fields, sampling_mask=[[[5, 8], [6]], None]).sampling_mask
    assert found is not None and found[0].tolist() == [[5, 8], [6]] and found[1] is None
    with pytest.raises(ValueError, match=r"^sampling_mask must have one entry for each token of completion_ids\.$"):
        Rollouts(**fields, sampling_mask=[[[5]], [[7]]])


def test_metrics_count_ids_and_tokens_that_were_cut_by_the_rule() -> None:
    kept = [KeptIds.of([[1, 2, 3], [], [4]]), KeptIds.of([[5, 6]])]
    mask = torch.tensor([[True, True, True, False], [False, False, False, False]])
    found = kept_stats({KEY: kept}, mask).compute()
    assert found == {
        "offpolicy/rollout/kept_ids_mean": pytest.approx(2.0),  # 3 and 1; the second row is not trained on
        "offpolicy/rollout/recomputed_cut_fraction": pytest.approx(1 / 3),
    }
    assert not kept_stats({}, mask).groups


def test_a_response_in_parts_has_those_of_its_parts() -> None:
    def part(ids: tuple[int, ...], kept: KeptIds | None) -> Part:
        return Part(token_ids=ids, logps=(-1.0,) * len(ids), version=0, finish_reason="abort", kept=kept)

    first, silent = part((5, 6), KeptIds.of([[5], [6, 7]])), part((8,), None)
    whole = ResponseInParts((first, silent, part((), KeptIds.of([])))).kept
    assert whole is not None and whole.tolist() == [[5], [6, 7], []]
    assert ResponseInParts((silent,)).kept is None
    with pytest.raises(ValueError, match=r"^kept must have one position for each of 1 tokens, but got 2\.$"):
        part((5,), KeptIds.of([[5], [6]]))


def test_replayed_rows_have_those_of_when_they_were_sampled() -> None:
    batch = generation_batch()
    batch["policy_versions"] = torch.zeros(ROWS, dtype=torch.long)
    batch |= {"tool_mask": None}
    lengths = batch["completion_mask"].sum(1).tolist()
    batch[KEY] = [KeptIds.of([[place, place + 1] for place in range(length)]) for length in lengths]
    groups = fresh_groups(batch, 3)
    sets = [one.kept_ids for group in groups for one in group.responses]
    assert sets == [tuple((place, place + 1) for place in range(length)) for length in lengths]
    unknown = Response(completion_ids=(1, 2), sampling_logps=(-1.0, -1.0), policy_versions=(0, 0), reward=0.0)
    padded = pad_groups([*groups, ReplayGroup(prompt_ids=(1,), responses=(unknown,), group_id=9)], pad_token_id=0)
    assert padded.kept_ids[:ROWS] == sets and padded.kept_ids[ROWS] == ((), ())
    assert max(lengths) <= LENGTH
