"""A sync and its proof as a rule on numbers; with real engines they are tested in test_colocate and test_server."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch

from trl_offpolicy.engines import sync as syncing
from trl_offpolicy.engines.engine import EngineError, SyncError, SyncReport
from trl_offpolicy.engines.sync import SyncCheck, SyncLimits, WeightSync, _portable, probe_of
from trl_offpolicy.engines.sync_trend import Drift
from trl_offpolicy.engines.sync_watch import Precision

TOKENS = 60


def walk(steps, size, seed=0):
    """The trainer's log-probs of a probe over versions: a random walk."""
    generator = torch.Generator().manual_seed(seed)
    moves = torch.randn(steps, TOKENS, generator=generator) * size
    return -1.0 + moves.cumsum(0)


def noisy(scores, noise, seed):
    generator = torch.Generator().manual_seed(seed)
    return (scores + noise * torch.randn(TOKENS, generator=generator)).tolist()


@pytest.mark.parametrize(("step", "noise"), [(1e-3, 1e-6), (1e-3, 0.03), (1.0, 1e-6), (1.0, 0.03), (0.0, 0.03)])
def test_no_alarm_while_syncs_arrive(step, noise):
    for seed in range(20):
        check = SyncCheck()
        for version, trainer in enumerate(walk(12, step, seed)):
            agreement = check.observe(
                version, engine=[noisy(trainer, noise, 100 * seed + version)], trainer=[trainer.tolist()]
            )
            assert agreement == pytest.approx(math.exp(-0.8 * noise), rel=0.3 * noise + 1e-5)


def test_rounding_that_grows_with_a_large_step_is_no_fault():
    check, trainer = SyncCheck(), walk(3, 1.0)
    for version, noise in enumerate((1e-3, 0.03, 0.05)):
        check.observe(version, engine=[noisy(trainer[version], noise, version)], trainer=[trainer[version].tolist()])


@pytest.mark.parametrize(("step", "noise"), [(1e-3, 1e-6), (1e-3, 0.03), (1.0, 0.03)])
def test_an_engine_that_stays_where_it_was_is_stale(step, noise):
    check, trainer = SyncCheck(), walk(4, step)
    for version in range(3):
        answer = noisy(trainer[version], noise, version)
        check.observe(version, engine=[answer], trainer=[trainer[version].tolist()])
    with pytest.raises(SyncError, match=r"version 3 .* Stale weights: its answers did not move"):
        check.observe(3, engine=[answer], trainer=[trainer[3].tolist()])


def test_an_older_version_is_named():
    check, trainer = SyncCheck(), walk(5, 0.1)
    for version in range(4):
        check.observe(version, engine=[noisy(trainer[version], 1e-5, version)], trainer=[trainer[version].tolist()])
    with pytest.raises(SyncError, match="it answers with version 1"):
        check.observe(4, engine=[noisy(trainer[1], 1e-5, 9)], trainer=[trainer[4].tolist()])


def test_half_a_file_is_a_fault_and_a_missing_adapter_is_named():
    trainer = walk(2, 0.1)
    base = (trainer[1] + 0.5).tolist()
    for answer, others, cause in (
        (noisy(trainer[1], 0.3, 1), {}, "arrived in part"),
        (base, {"the base model": [base]}, "answers as the base model: the adapter was not applied"),
    ):
        check = SyncCheck()
        check.observe(0, engine=[noisy(trainer[0], 1e-4, 0)], trainer=[trainer[0].tolist()])
        with pytest.raises(SyncError, match=cause):
            check.observe(1, engine=[answer], trainer=[trainer[1].tolist()], others=others)


def test_another_model_fails_at_the_first_sync_and_nan_at_any():
    with pytest.raises(SyncError, match="Another model"):
        SyncCheck().observe(0, engine=[[-5.0, -9.0]], trainer=[[-1.0, -2.0]])
    with pytest.raises(SyncError, match="not finite"):
        SyncCheck().observe(0, engine=[[-1.0, math.nan]], trainer=[[-1.0, -2.0]])


def test_only_the_last_versions_are_kept():
    check, trainer = SyncCheck(SyncLimits(history=3)), walk(20, 0.1)
    for version in range(20):
        check.observe(version, engine=[noisy(trainer[version], 1e-4, version)], trainer=[trainer[version].tolist()])
    assert sorted(check._trainer) == [17, 18, 19]


def test_the_probe_is_a_few_distinct_cut_prompts():
    assert probe_of([[1] * 100, [1] * 100, [2, 3], [4]]) == [[1] * 48, [2, 3]]
    with pytest.raises(SyncError, match="at least two tokens"):
        probe_of([[1]])


# -------------------------------------------------------------------------------------------------------------- a sync

PROBE = [[5, 6, 7], [8, 9]]


class World:
    """A trainer of one number a token, and an engine that may get it."""

    def __init__(self):
        self.weight, self.engine, self.adapted, self.calls = -1.0, -9.0, True, []

    def score(self, ids):
        self.calls.append("trainer")
        return [[self.weight if self.adapted else -1.0] * (len(row) - 1) for row in ids]

    @contextmanager
    def without_adapter(self):
        self.adapted = False
        yield
        self.adapted = True

    def send(self, version):
        self.calls.append("send")
        self.engine = self.weight
        return SyncReport(version=version, kind="memory", bytes=8, seconds=0.5)

    def answer(self, ids):
        self.calls.append("engine")
        return [[self.engine] * (len(row) - 1) for row in ids]


def test_a_sync_sends_then_proves_then_reports():
    world = World()
    report = WeightSync(PROBE, world.score)(3, send=world.send, answer=world.answer)
    assert world.calls == ["send", "trainer", "engine"]
    assert report == SyncReport(version=3, kind="memory", bytes=8, seconds=0.5, agreement=1.0)
    assert report.metrics() == {"sync_seconds": 0.5, "sync_bytes": 8.0, "sync_agreement": 1.0}


def partly(world, *, ends):
    """An engine that gets only a part at its second sync; ``ends`` = sends after which it has everything again."""
    sends, told = [], []

    def send(version):
        sends.append(version)
        if len(sends) == 2 or len(sends) > ends:
            return SyncReport(version=version, kind="memory", bytes=1, seconds=0.1, whole=False)
        return world.send(version)

    def confirm(proven):
        told.append(proven)
        return not proven and told.count(False) == 1

    return {"send": send, "answer": world.answer, "confirm": confirm}, sends, told


def test_after_a_part_that_fails_its_proof_everything_is_sent_and_proved_again(caplog):
    world = World()
    sync, (ways, sends, told) = WeightSync(PROBE, world.score), partly(world, ends=9)
    sync(0, **ways)
    world.weight = -4.0
    report = sync(1, **ways)
    assert (sends, told) == ([0, 1, 1], [True, False, True])
    assert report.whole and report.bytes == 8 and report.agreement == 1.0
    assert "Only changed weights were sent; from now on all are." in caplog.text


def test_if_that_fails_as_well_it_is_an_error():
    world = World()
    sync, (ways, sends, told) = WeightSync(PROBE, world.score), partly(world, ends=1)
    sync(0, **ways)
    world.weight = -4.0
    with pytest.raises(SyncError, match="Stale weights"):
        sync(1, **ways)
    assert (sends, told) == ([0, 1, 1], [True, False])


def test_without_a_probe_nobody_scores():
    world = World()
    report = WeightSync()(3, send=world.send, answer=world.answer)
    assert world.calls == ["send"] and report.agreement is None
    assert set(report.metrics()) == {"sync_seconds", "sync_bytes"}
    with pytest.raises(ValueError, match="probe and score must be given together"):
        WeightSync(PROBE)


def test_weights_that_are_lost_are_found_and_a_lost_adapter_is_named():
    world = World()
    sync = WeightSync(PROBE, world.score, without_adapter=world.without_adapter)
    sync(0, send=world.send, answer=world.answer)
    world.weight = -2.0
    lost = SyncReport(version=1, kind="memory", bytes=0, seconds=0.0)
    with pytest.raises(SyncError, match="Stale weights"):
        sync(1, send=lambda version: lost, answer=world.answer)
    other = WeightSync(PROBE, world.score, without_adapter=world.without_adapter)
    world.weight = -4.0
    with pytest.raises(SyncError, match="answers as the base model without the adapter"):
        other(1, send=lambda version: lost, answer=world.answer)


@pytest.mark.parametrize("where", ["send", "proof"])
def test_an_error_of_one_rank_is_raised_on_all(monkeypatch, where):
    """Here the other rank fails: this one, which did nothing wrong, must not go on and wait for it."""
    world, of_another, gathers = World(), EngineError("of another rank"), []

    def gathered(value):
        gathers.append(value)
        return [value, of_another] if len(gathers) == (1 if where == "send" else 2) else [value, value]

    monkeypatch.setattr(syncing, "gather_objects", gathered)
    with pytest.raises(EngineError, match="of another rank"):
        WeightSync(PROBE, world.score)(0, send=world.send, answer=world.answer)
    assert world.calls == (["send"] if where == "send" else ["send", "trainer", "engine"])


def test_ranks_without_an_engine_score_but_do_not_count(monkeypatch):
    world = World()
    monkeypatch.setattr(syncing, "gather_objects", lambda value: [value, 0.5 if value is not None else None])
    sync = WeightSync(PROBE, world.score)
    assert sync(0, send=world.send, answer=lambda ids: None).agreement is None
    assert world.calls == ["send", "trainer"]


# ------------------------------------------------------------------------------------- weights that never quite arrive


class Lagging:
    """An engine that makes ``follow`` of each move of a trainer on 60 tokens, with bfloat16's noise or none."""

    def __init__(self, kind, *, follow=0.85, noise=1e-6, dtype=torch.float32):
        self.weights = {"uniform": 0.01 * torch.arange(50.0)[:, None].expand(50, TOKENS), "walk": walk(50, 0.01)}[kind]
        self.follow, self.noise, self.dtype, self.now, self.has = follow, noise, dtype, 0, None
        self.sync, self.sends = WeightSync([list(range(TOKENS + 1))], self.score), []

    def score(self, ids):
        return [self.weights[self.now].tolist()]

    def send(self, version):
        self.has = self.weights[0] + self.follow * (self.weights[version] - self.weights[0])
        self.sends.append(version)
        list(self.sync.watch.passing(iter([("weight", self.weights[version].to(self.dtype))])))
        return SyncReport(version=version, kind="memory", bytes=8, seconds=0.1)

    def answer(self, ids):
        return [noisy(self.has, self.noise, self.now)]

    def run(self, precision=None, **ways):
        for self.now in range(50):
            ways = {"send": self.send, "answer": self.answer, **ways}
            self.sync(self.now, precision=precision or Precision(self.dtype), **ways)


@pytest.mark.parametrize("kind", ["uniform", "walk"])
def test_an_engine_that_follows_a_part_of_each_move_is_an_error_where_precision_cannot_be_the_cause(kind):
    world = Lagging(kind)
    with pytest.raises(SyncError, match=r"15% of what the trainer moves is missing .* a part of the weights does not"):
        world.run()
    assert world.now < 40


@pytest.mark.parametrize(
    ("precision", "adapter", "dtype"),
    [
        (Precision(torch.bfloat16), False, torch.float32),
        (Precision(None), False, torch.float32),
        (Precision(torch.bfloat16), True, torch.bfloat16),
    ],
)
def test_where_precision_can_be_the_cause_it_is_one_warning_with_the_next_test(precision, adapter, dtype, caplog):
    world = Lagging("uniform", dtype=dtype)
    if adapter:
        world.sync._without_adapter = lambda: (yield)
        world.sync._without_adapter = contextmanager(world.sync._without_adapter)
    world.run(precision)
    assert world.now == 49 and len(caplog.records) == 1
    for text in ("15% of what the trainer moves is missing", "cannot be told from this", "trl-offpolicy probe --model"):
        assert text in caplog.text


@pytest.mark.parametrize("noise", [1e-6, 0.03])
@pytest.mark.parametrize("kind", ["uniform", "walk"])
def test_an_engine_that_follows_gives_neither(kind, noise, caplog):
    Lagging(kind, follow=1.0, noise=noise).run()
    assert not caplog.records


@pytest.mark.parametrize("helps", [True, False])
def test_a_drift_after_a_part_has_all_weights_sent_and_proved(helps, caplog):
    """What was left out had changed: whole weights mend it, and if they do not, it is an error."""
    world, partial = Lagging("uniform"), [True]

    def send(version):
        world.send(version)
        if not partial[0] and helps:
            world.has, world.follow = world.weights[version], 1.0
        whole = not partial[0] or version == 0
        return SyncReport(version=version, kind="memory", bytes=8, seconds=0.1, whole=whole)

    def confirm(proven):
        again, partial[0] = partial[0] and not proven, partial[0] and proven
        return again

    if helps:
        world.run(send=send, confirm=confirm)
        assert len(world.sends) == 51 and len(caplog.records) == 1
        assert "Only changed weights were sent; from now on all are." in caplog.text
    else:
        with pytest.raises(SyncError, match="15% of what the trainer moves is missing"):
            world.run(send=send, confirm=confirm)
        assert world.sends[-2] == world.sends[-1]


@pytest.mark.parametrize("exact", [True, False])
def test_a_drift_of_another_ranks_engine_stops_or_warns_this_one(exact, monkeypatch, caplog):
    """This rank's engine follows; the other's lags. Either all ranks raise, or none does."""
    world, drift = Lagging("uniform", follow=1.0), Drift(9, 0.5, 0.1, 0.001, 0.2)
    other = syncing.Proof(0.9, drift)
    monkeypatch.setattr(syncing, "gather_objects", lambda value: [value, other if isinstance(value, float) else value])
    precision = Precision(torch.float32 if exact else torch.bfloat16)
    if exact:
        with pytest.raises(SyncError, match=r"In 9 syncs the trainer moved by 0\.5 nats"):
            world.run(precision)
        assert world.now == 0
    else:
        world.run(precision)
        assert "20% of what the trainer moves is missing" in caplog.text


# ------------------------------------------------------------------------------------ a trainer coarser than its engine


def coarse_runs(coarse, step, noise):
    """The number of runs of 20 that a check stops although the engine, exact, has each version's weights."""
    stopped = 0
    for seed in range(20):
        check = SyncCheck(coarse_trainer=coarse)
        try:
            for version, weights in enumerate(walk(12, step, seed)):
                trainer = noisy(weights, noise, 100 * seed + version)
                check.observe(version, engine=[weights.tolist()], trainer=[trainer])
        except SyncError as error:
            assert "did not move" in str(error)
            stopped += 1
    return stopped


@pytest.mark.parametrize("step", [1e-6, 1e-5, 1e-3, 1.0])
def test_rounding_of_the_trainer_alone_is_no_stale_engine(step):
    assert coarse_runs(True, step, 0.004) == 0


def test_an_engine_that_stays_is_stale_beside_a_coarse_trainer_too_once_that_moved():
    assert coarse_runs(False, 1e-5, 0.004) == 20  # what the rule is for
    check, trainer = SyncCheck(coarse_trainer=True), walk(3, 0.05)
    for version in range(2):
        check.observe(version, engine=[trainer[version].tolist()], trainer=[noisy(trainer[version], 0.004, version)])
    with pytest.raises(SyncError, match="Stale weights"):
        check.observe(2, engine=[trainer[1].tolist()], trainer=[noisy(trainer[2], 0.004, 2)])


@pytest.mark.parametrize(("autocast", "coarse"), [(torch.bfloat16, True), (None, False)])
def test_the_check_knows_the_trainers_autocast(autocast, coarse):
    def send(version):
        return SyncReport(version=version, kind="memory", bytes=0, seconds=0.0)

    sync = WeightSync([[1, 2]], lambda ids: [[-1.0]], autocast=autocast)
    sync(0, send=send, answer=lambda ids: [[-1.0]], precision=Precision(torch.float32))
    assert sync._check.coarse_trainer is coarse


def test_a_second_run_counts_its_versions_from_zero_again():
    check, trainer = SyncCheck(), walk(24, 0.1)
    for at, version in enumerate([*range(12), *range(12)]):
        check.observe(version, engine=[noisy(trainer[at], 1e-4, at)], trainer=[trainer[at].tolist()])
    assert list(check._trainer) == list(range(4, 12))


@pytest.mark.parametrize(
    ("kind", "held", "warned"), [("adapter", torch.bfloat16, 1), ("memory", torch.bfloat16, 0), ("adapter", None, 0)]
)
def test_an_adapter_upon_another_base_is_told_once(kind, held, warned, caplog):
    """The first proof has no floor to compare with, and accepts much. An adapter starts as zero: it shows the base."""

    def send(version):
        return SyncReport(version=version, kind=kind, bytes=0, seconds=0.0)

    sync = WeightSync([[1, 2]], lambda ids: [[-1.0]])
    for version in range(3):
        sync(version, send=send, answer=lambda ids: [[-1.6]], precision=Precision(held))
    assert [record.message.count("Its base weights may be other ones") for record in caplog.records] == [1] * warned


class _Awkward(Exception):
    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


def test_an_error_that_no_other_process_could_read_is_sent_as_text():
    assert type(_portable(ValueError("x"))) is ValueError
    sent = _portable(_Awkward(404, "gone"))
    assert type(sent) is EngineError and str(sent) == "_Awkward: gone"
