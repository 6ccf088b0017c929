"""Copies and averages of weights: each token under the weights that sampled it, and the model as it was afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trl_offpolicy.objective.proximal import InterpolatedProximal, RecomputedProximal
from trl_offpolicy.rollouts.ahead.local_weights import copied, loaded
from trl_offpolicy.rollouts.ahead.old_policy import (
    OLD,
    PROXIMAL,
    InItsOwnModel,
    InTheModel,
    OldPolicy,
    Snapshots,
    WeightAverage,
)
from trl_offpolicy.rollouts.ahead.settings import AsyncSettings


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Parameter(torch.tensor(5.0), requires_grad=False)


def set_to(model: Model, value: float) -> None:
    with torch.no_grad():
        model.scale.fill_(value)


@pytest.mark.parametrize("place", [InTheModel, InItsOwnModel])
def test_each_token_is_scored_with_the_weights_of_its_version(place: Any) -> None:
    model, kept = Model(), Snapshots(place())
    for version in (3, 4, 5):
        set_to(model, 10.0 * version)
        kept.keep(model, version, oldest=3)
    set_to(model, -1.0)
    versions = torch.tensor([[3, 3, 4], [5, 4, 9]])
    mask = torch.tensor([[True, True, True], [True, True, False]])

    scored = kept.score(model, lambda held: held.scale.detach() + torch.zeros(2, 3), versions, mask)

    assert scored.tolist() == [[30.0, 30.0, 40.0], [50.0, 40.0, 0.0]]
    assert model.scale.item() == -1.0


def test_a_model_of_its_own_leaves_the_trained_weights_alone_and_loads_a_version_once() -> None:
    model, kept, loads = Model(), Snapshots(InItsOwnModel()), []
    own, writes = model.scale, []
    for version in (0, 1):
        set_to(model, float(version))
        kept.keep(model, version, oldest=0)
    set_to(model, 9.0)

    def score(held: Model) -> torch.Tensor:
        loads.append(held.scale._version)  # counts the writes into this tensor
        writes.append(own._version)
        assert held is not model and held.scale.data_ptr() != own.data_ptr() and not held.scale.requires_grad
        assert held.frozen is model.frozen  # under an adapter: the base model, which takes no memory again
        return held.scale.detach() + torch.zeros(1, 1)

    of = [kept.score(model, score, torch.tensor([[version]]), torch.ones(1, 1).bool()) for version in (0, 0, 1, 1, 0)]
    assert [one.item() for one in of] == [0.0, 0.0, 1.0, 1.0, 0.0]
    assert [after - loads[0] for after in loads] == [0, 0, 1, 1, 2]
    assert len(set(writes)) == 1 and own.item() == 9.0 and own.requires_grad

    set_to(model, 5.0)
    kept.keep(model, 0, oldest=0)  # another run begins at version 0
    assert kept.score(model, score, torch.zeros(1, 1).long(), torch.ones(1, 1).bool()).item() == 5.0


def test_the_mixture_takes_every_version_by_its_share_of_the_tokens() -> None:
    """Probabilities 0.5, 0.25 and 0.125 under versions 3 to 5, which sampled 3, 2 and 0 of the five tokens."""
    model, kept = Model(), Snapshots()
    for version, value in ((3, 0.5), (4, 0.25), (5, 0.125)):
        set_to(model, value)
        kept.keep(model, version, oldest=3)
    versions, mask = torch.tensor([[3, 3, 4], [4, 3, 5]]), torch.tensor([[True] * 3, [True, True, False]])
    calls: list[float] = []

    def score(held: Model) -> torch.Tensor:
        calls.append(held.scale.item())
        return held.scale.detach().log() + torch.zeros(2, 3)

    mixed, own = kept.mixture(model, score, versions, mask)

    assert calls == [0.5, 0.25]  # one forward for each version that is there
    m = 3 / 5 * 0.5 + 2 / 5 * 0.25
    torch.testing.assert_close(mixed.exp(), torch.tensor([[m, m, m], [m, m, 1.0]]))
    torch.testing.assert_close(own.exp(), torch.tensor([[0.5, 0.5, 0.25], [0.25, 0.5, 1.0]]))
    assert kept.mixture(model, score, versions, torch.zeros(2, 3).bool())[0].tolist() == [[0.0] * 3] * 2
    with pytest.raises(ValueError, match=r"^versions must be among \[3, 4, 5\], .* but got 2"):
        kept.mixture(model, score, torch.full((2, 3), 2), mask)


def test_the_engines_log_probs_move_with_the_mixture() -> None:
    """old / sampling stays the engine's own mismatch, and pi / sampling has the mixture in its denominator."""
    model, old = Model(), OldPolicy(AsyncSettings(lag=2, old_logps="balance"))
    for version, value in ((0, 0.5), (1, 0.25)):
        set_to(model, value)
        old.keep(model, version, oldest=0)
    engine = torch.tensor([[0.4, 0.3]]).log()
    rows = {"completion_ids": torch.zeros(1, 2), "sampling_per_token_logps": engine}
    old.complete(
        rows, [[0, 1]], model=model, proximal=RecomputedProximal(), mask=torch.ones(1, 2).bool(), current=2,
        score=lambda held: held.scale.detach().log() + torch.zeros(1, 2),
    )  # fmt: skip
    m = 0.375  # half the tokens are of each version
    torch.testing.assert_close(rows["old_per_token_logps"].exp(), torch.tensor([[m, m]]))
    mismatch = rows["old_per_token_logps"] - rows["sampling_per_token_logps"]
    torch.testing.assert_close(mismatch.exp(), torch.tensor([[0.5 / 0.4, 0.25 / 0.3]]))
    assert old.name_of_scores(RecomputedProximal()) is None


def test_versions_that_no_token_can_be_of_are_forgotten() -> None:
    model, kept = Model(), Snapshots()
    for version in range(6):
        kept.keep(model, version, oldest=version - 2)

    assert kept.versions == [3, 4, 5]
    with pytest.raises(ValueError, match=r"^versions must be among \[3, 4, 5\], .* but got 2"):
        kept.score(model, lambda _: torch.zeros(1, 1), torch.tensor([[2]]), torch.tensor([[True]]))


def test_no_tokens_need_no_copy() -> None:
    assert Snapshots().score(Model(), torch.zeros, torch.tensor([[2]]), torch.tensor([[False]])).tolist() == [[0.0]]


def test_a_copy_is_not_a_view() -> None:
    model, kept = Model(), Snapshots()
    kept.keep(model, 0, oldest=0)
    set_to(model, 7.0)

    scored = kept.score(
        model, lambda held: held.scale.detach().clone().view(1, 1), torch.tensor([[0]]), torch.tensor([[True]])
    )
    assert scored.item() == 1.0


def test_the_models_own_weights_come_back_after_an_error() -> None:
    model = Model()
    own = model.scale.data

    with pytest.raises(RuntimeError), loaded(model, {"scale": torch.tensor(2.0)}):
        assert model.scale.item() == 2.0
        raise RuntimeError
    assert model.scale.item() == 1.0 and model.scale.data.data_ptr() == own.data_ptr()
    assert list(copied(model)) == ["scale"]


def test_the_average_moves_by_the_steps_since() -> None:
    """1, then 3 a step later, then 11 two steps later, decay 1/2: 2, then 2/4 + 3 * 11/4."""
    model, average, seen = Model(), WeightAverage(0.5), []
    for version, value in ((0, 1.0), (1, 3.0), (3, 11.0)):
        set_to(model, value)
        average.add(model, version)
        seen.append(average.score(model, lambda held: held.scale.detach().clone()).item())

    assert seen == [1.0, 2.0, 8.75]
    assert model.scale.item() == 11.0


def test_another_run_begins_another_average_and_keeps_no_later_copies() -> None:
    """A power of the decay below 0 would give the old average a weight above 1, and the new weights one below 0."""
    model, average, kept = Model(), WeightAverage(0.9), Snapshots()
    for version in (0, 50):
        average.add(model, version)
        kept.keep(model, version, oldest=0)
    set_to(model, 3.0)
    average.add(model, 0)
    kept.keep(model, 0, oldest=0)
    assert average.score(model, lambda held: held.scale.detach().clone()).item() == 3.0
    assert kept.versions == [0]


def test_the_average_is_of_the_versions_with_a_generation_batch_however_often_weights_are_sent() -> None:
    """Version 1 is only sent (an evaluation); 2 is sent before its batch, and has two: 1, then 1/4 + 3 * 9/4, twice."""
    model, old, seen = Model(), OldPolicy(AsyncSettings(old_logps="ewma", ewma_decay=0.5)), []
    ids = torch.zeros(1, 2, dtype=torch.long)
    for version, value, batches in ((0, 1.0, 1), (1, 100.0, 0), (2, 9.0, 2)):
        set_to(model, value)
        old.keep(model, version, oldest=0)
        for _ in range(batches):
            rows = {"completion_ids": ids}
            old.complete(
                rows, [[version] * 2], model=model, proximal=RecomputedProximal(), mask=torch.ones(1, 2).bool(),
                score=lambda held: held.scale.detach().expand(1, 2).clone(), current=version,
            )  # fmt: skip
            seen.append(rows[PROXIMAL][0, 0].item())

    assert seen == [1.0, 7.0, 7.0]


def completed(old: OldPolicy, model: Model, rows: dict[str, Any], versions: list[list[int]], **changes: Any) -> Any:
    """The batch after :meth:`OldPolicy.complete`; each row scores as the weight it is scored with."""
    ids = torch.zeros(len(versions), 2, dtype=torch.long)
    rows = {"completion_ids": ids, **rows}
    options: dict[str, Any] = {
        "model": model, "proximal": RecomputedProximal(), "mask": torch.ones_like(ids).bool(), "current": 7,
        "score": lambda held: held.scale.detach() + torch.zeros(ids.shape),
    }  # fmt: skip
    old.complete(rows, versions, **{**options, **changes})
    return rows


@pytest.mark.parametrize("old_logps", ["snapshot", "model"])
def test_copies_give_the_old_log_probs_of_each_tokens_version(old_logps: Any) -> None:
    """Nothing keeps the log-probs at the current weights: with copies the clip is around the old policy."""
    model, old = Model(), OldPolicy(AsyncSettings(lag=2, old_logps=old_logps))
    for version in (3, 4):
        set_to(model, -float(version))
        old.keep(model, version, oldest=3)
    set_to(model, -9.0)
    scored_by: list[Any] = []

    def score(held: Model) -> torch.Tensor:
        scored_by.append(held is model)
        return held.scale.detach() + torch.zeros(2, 2)

    mask = torch.tensor([[True, True], [True, False]])
    rows = completed(old, model, {OLD: torch.ones(2, 2)}, [[3, 4], [4]], score=score, mask=mask)
    assert rows[OLD].tolist() == [[-3.0, -4.0], [-4.0, 0.0]] and PROXIMAL not in rows
    assert rows["policy_versions"].tolist() == [[3, 4], [4, 4]]
    assert scored_by == [old_logps == "snapshot"] * 2 and model.scale.item() == -9.0
    assert not old.reads_scores(RecomputedProximal()) and old.name_of_scores(RecomputedProximal()) is None


def test_without_copies_the_current_weights_are_the_proximal_policy() -> None:
    model, old = Model(), OldPolicy(AsyncSettings())
    old.keep(model, 0, oldest=0)
    today = torch.full((2, 2), -1.0)
    rows = completed(old, model, {OLD: today}, [[6, 6], []])
    assert rows[PROXIMAL] is today and OLD not in rows and old.average is None
    assert rows["policy_versions"].tolist() == [[6, 6], [7, 7]]  # a row without a token has the present version
    assert old.reads_scores(RecomputedProximal()) and not old.reads_scores(InterpolatedProximal())
    assert old.name_of_scores(RecomputedProximal()) == PROXIMAL
    assert old.name_of_scores(InterpolatedProximal()) is None  # it makes its own centre
    for rows in (
        completed(old, model, {OLD: today}, [[6, 6]], proximal=InterpolatedProximal()),
        completed(old, model, {}, [[6, 6]]),  # nothing was scored
    ):
        assert set(rows) == {"completion_ids", "policy_versions"}
    assert not OldPolicy(AsyncSettings(old_logps="refuse")).reads_scores(RecomputedProximal())


@pytest.mark.parametrize(("old_logps", "freed"), [("snapshot", 2), ("balance", 2), ("ewma", 2), ("model", 0)])
def test_what_deepspeed_has_gathered_is_freed_before_and_after_an_exchange(old_logps: Any, freed: int) -> None:
    model, calls = Model(), list[int]()
    old = OldPolicy(AsyncSettings(lag=2, old_logps=old_logps), release=lambda: calls.append(1))
    old.keep(model, 0, oldest=0)
    completed(old, model, {}, [[0, 0]])
    assert len(calls) == freed  # a second model exchanges nothing


def test_an_average_continues_from_a_checkpoint() -> None:
    model, first, second = Model(), WeightAverage(0.5), WeightAverage(0.5)
    first.add(model, 4)
    second.load_state_dict(first.state_dict())
    set_to(model, 5.0)
    for average in (first, second):
        average.add(model, 6)
        assert average.score(model, lambda held: held.scale.item()) == 4.0  # type: ignore[arg-type, return-value]
    assert second.state_dict() == {"version": 6, "average": {"scale": torch.tensor(4.0)}}


def test_autocast_does_not_score_a_copy_with_the_weights_of_before() -> None:
    """It keeps rounded weights until it ends, and a whole training step is inside one under Lightning."""
    model, ones = nn.Linear(4, 1, bias=False), torch.ones(1, 4)
    nn.init.ones_(model.weight)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        seen = [model(ones).item()]
        with loaded(model, {"weight": torch.full((1, 4), 3.0)}):
            seen.append(model(ones).item())
        seen.append(model(ones).item())
    assert seen == [4.0, 12.0, 4.0]


@pytest.mark.parametrize(
    ("second", "shard", "names"),
    [(torch.zeros(2), torch.zeros(2), "zero_hpz_partition_size"), (None, torch.zeros(0), "offload_param.device")],
)
def test_shards_that_cannot_be_exchanged_are_refused(
    second: torch.Tensor | None, shard: torch.Tensor, names: str
) -> None:
    """ZeRO-3 with a second copy of its shards, and with shards on a disk, as DeepSpeed marks its parameters."""
    model: Any = Model()
    model.scale.ds_tensor, model.scale.ds_secondary_tensor = shard, second
    model.scale.partition_numel = lambda: 2
    with pytest.raises(NotImplementedError, match=f"^{names} must be"):
        copied(model)
