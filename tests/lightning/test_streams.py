"""The order of micro-steps: whole groups, every prompt once an epoch, ranks side by side, resumable anywhere."""

from __future__ import annotations

import pytest

from lightning_module.streams import BatchPlan, HeldOutStream, PromptStream

ROWS = [{"prompt": str(i)} for i in range(12)]
PLAN = BatchPlan(micro_batch_size=4, num_generations=4, steps_per_generation=2, num_iterations=2)


def seen(stream):
    return [(step.generation, step.slot, step.iteration, [row["prompt"] for row in step.prompts]) for step in stream]


def test_a_generation_batch_feeds_every_slot_in_every_iteration():
    steps = seen(PromptStream(ROWS, PLAN))
    assert len(steps) == 6 * PLAN.window == len(PromptStream(ROWS, PLAN))
    assert steps[:4] == [((0, 0), slot, i, ["0", "1"]) for i in range(2) for slot in range(2)]
    assert steps[4][0] == (0, 1) and steps[4][3] == ["2", "3"]


def test_ranks_take_neighbouring_groups_of_one_generation_batch():
    ranks = [seen(PromptStream(ROWS, PLAN, rank=rank, world_size=2)) for rank in range(2)]
    assert [steps[0][3] for steps in ranks] == [["0", "1"], ["2", "3"]]
    assert [steps[4][3] for steps in ranks] == [["4", "5"], ["6", "7"]]
    assert all(len(steps) == 3 * PLAN.window for steps in ranks)


def test_every_epoch_shuffles_anew_and_the_same_way_on_every_rank():
    def epochs(rank):
        stream = PromptStream(ROWS, PLAN, rank=rank, world_size=2, shuffle=True, seed=3)
        return [[prompt for step in seen(stream)[:: PLAN.window] for prompt in step[3]] for _ in range(2)]

    first, second = ([one + other for one, other in zip(*pair, strict=True)] for pair in [(epochs(0), epochs(1))] * 2)
    assert first == second
    assert sorted(first[0]) == sorted(first[1]) == sorted(row["prompt"] for row in ROWS)
    assert first[0] != first[1]


@pytest.mark.parametrize("taken", [0, 1, 5, 23, 24])
def test_it_goes_on_where_its_state_was_saved(taken):
    whole = PromptStream(ROWS, PLAN, shuffle=True)
    expected = seen(whole) + seen(whole)
    stopped = PromptStream(ROWS, PLAN, shuffle=True)
    iterator = iter(stopped)
    for _ in range(taken):
        next(iterator)
    resumed = PromptStream(ROWS, PLAN, shuffle=True)
    resumed.load_state_dict(stopped.state_dict())
    assert (seen(resumed) + seen(resumed))[: len(expected) - taken] == expected[taken:]


def test_an_epoch_that_the_trainer_cuts_short_is_over_when_it_says_so():
    stream = PromptStream(ROWS, PLAN, epoch_length=lambda: 6)
    iterator = iter(stream)
    for _ in range(6):
        next(iterator)
    assert stream.state_dict() == {"epoch": 1, "position": 0}


def test_too_few_prompts_are_repeated_rather_than_none_trained():
    steps = seen(PromptStream(ROWS[:1], PLAN))
    assert len(steps) == PLAN.window and steps[0][3] == ["0", "0"]


def test_torn_groups_and_empty_data_are_refused():
    with pytest.raises(ValueError, match=r"micro_batch_size x steps_per_generation must be a multiple"):
        BatchPlan(micro_batch_size=6, num_generations=4)
    with pytest.raises(ValueError, match="num_iterations must be a positive whole number"):
        BatchPlan(micro_batch_size=4, num_generations=4, num_iterations=0)
    with pytest.raises(ValueError, match="dataset must hold at least one prompt"):
        PromptStream([], PLAN)


def test_held_out_ranks_have_as_many_batches_and_count_every_row_once():
    ranks = [list(HeldOutStream(ROWS[:5], 2, 3, rank=rank, world_size=2)) for rank in range(2)]
    assert [len(batches) for batches in ranks] == [2, 2]
    counted = [row["prompt"] for batches in ranks for batch in batches for row in batch.prompts[: batch.counted]]
    assert sorted(counted) == ["0", "1", "2", "3", "4"]
    assert all(len(batch.prompts) == 2 for batches in ranks for batch in batches)
