"""The simulation of asynchronous throughput: what must hold by construction, and small cases worked out by hand."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import async_sim
from benchmarks.async_queue import Costs, Floats, Outcome, Schedule, colocated, simulate

ROOT = Path(__file__).resolve().parents[2]
PLAIN = Costs(token=0.01, train_token=0.001)
REAL = Costs(token=0.01, prefill=0.1, train_token=0.0008, step=0.3, sync=0.4, pause=0.2)


def lengths(seed: int, steps: int = 12, batch: int = 16, sigma: float = 1.0) -> Floats:
    rng = np.random.default_rng(seed)
    return async_sim.lognormal_lengths(batch * steps, median=100.0, sigma=sigma, longest=4000, rng=rng)


def run(seed: int, schedule: Schedule, costs: Costs = REAL, *, slots: int = 12, batch: int = 16) -> Outcome:
    return simulate(lengths(seed), batch=batch, slots=slots, costs=costs, schedule=schedule)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("slots", [3, 16, 40])
def test_eta_zero_is_the_synchronous_sum(seed: int, slots: int) -> None:
    """Sampling, training and sync one after the other; sampling is a list schedule on the slots."""
    seconds = 0.0
    for part in lengths(seed).reshape(-1, 16):
        free = [0.0] * slots
        for tokens in part:
            place = free.index(min(free))
            free[place] += REAL.prefill + REAL.token * tokens
        seconds += max(free) + REAL.step + REAL.train_token * part.sum() + REAL.sync + REAL.pause
    seconds -= REAL.sync + REAL.pause  # after the last step nobody waits for them
    found = run(seed, Schedule(eta=0), slots=slots)
    assert found.throughput == pytest.approx(lengths(seed).sum() / seconds)
    assert found.lag_max == 0 and found.crossing == 0.0


def test_equal_lengths_and_times_overlap_to_a_factor_of_two() -> None:
    """20 steps of 1 s + 1 s: 40 s synchronous, 21 s with one step ahead."""
    equal = np.full(10 * 20, 100.0)
    costs = Costs(token=0.01, train_token=0.001)
    options = {"batch": 10, "slots": 10, "costs": costs}
    base = simulate(equal, schedule=Schedule(eta=0), **options)
    for schedule in (Schedule(eta=1, barrier=True), Schedule(eta=1), Schedule(eta=8)):
        ahead = simulate(equal, schedule=schedule, **options)
        assert ahead.throughput / base.throughput == pytest.approx(40 / 21)
    one = simulate(equal, schedule=Schedule(eta=1, barrier=True), **options)
    assert (one.lag_max, one.lag_mean) == (1, pytest.approx(19 / 20))
    assert one.sampler_idle == pytest.approx(1 / 21) and one.learner_idle == pytest.approx(1 / 21)
    assert base.sampler_idle == pytest.approx(0.5) and base.learner_idle == pytest.approx(0.5)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("slots", [4, 16, 64])
def test_throughput_never_falls_and_lag_never_exceeds_eta(seed: int, slots: int) -> None:
    costs = Costs(token=0.01, prefill=0.1, train_token=0.0008, step=0.3, sync=0.4)
    before = 0.0
    for eta in (0, 1, 2, 3, 4, 8, 16, math.inf):
        found = run(seed, Schedule(eta=eta), costs, slots=slots)
        assert found.lag_max <= eta
        assert found.throughput >= before * (1 - 1e-9)
        before = found.throughput


def test_lag_is_used_where_samplers_are_fast() -> None:
    """With more slots than the learner can keep up with, the lag rises to eta; with few it stays below."""
    for eta in (1, 2, 4):
        assert run(0, Schedule(eta=eta), slots=200).lag_max == eta
    assert run(0, Schedule(eta=8), slots=2).lag_mean < 1.5


def test_a_straggler_is_overtaken_only_if_asked() -> None:
    """One response of 1000 tokens among 40 of 10: in order it holds all up, else its lag grows past eta."""
    tail = np.full(40, 10.0)
    tail[0] = 1000.0
    options = {"batch": 4, "slots": 8, "costs": PLAIN}
    ordered = simulate(tail, schedule=Schedule(eta=1), **options)
    finished = simulate(tail, schedule=Schedule(eta=1, order="finished"), **options)
    assert ordered.lag_max <= 1 < finished.lag_max
    assert finished.waiting_max <= 2 * 4


def test_barrier_waits_for_the_training_to_begin() -> None:
    """Samplers that could run ahead do not; between the synchronous run and the one without barrier."""
    for seed in range(4):
        base, one, free = (
            run(seed, schedule).throughput
            for schedule in (Schedule(eta=0), Schedule(eta=1, barrier=True), Schedule(eta=1))
        )
        assert base < one <= free * (1 + 1e-9)


@pytest.mark.parametrize("queue", [16, 20, 40])
def test_a_queue_bounds_what_waits(queue: int) -> None:
    """Admission looks at what waits; what is in flight then may still land."""
    free, bounded = run(0, Schedule(eta=8), slots=8), run(0, Schedule(eta=8, queue=queue), slots=8)
    assert bounded.waiting_max <= queue + 8 - 1
    assert bounded.throughput <= free.throughput * (1 + 1e-9)


def test_a_pause_holds_up_what_is_in_flight() -> None:
    """Two responses of 10 s, B = 1, one sync with 3 s of pause in the middle of the second."""
    costs = Costs(token=1.0, train_token=0.0, step=2.0, sync=1.0, pause=3.0)
    two = np.array([10.0, 10.0])
    found = simulate(two, batch=1, slots=1, costs=costs, schedule=Schedule(eta=1))
    assert found.throughput == pytest.approx(20 / (10 + 10 + 3 + 2))
    assert found.crossing == 0.5 and found.lag_max == 1


def test_colocated_has_no_idle_half() -> None:
    """Equal lengths, twice the GPUs for each phase: half the time each, as fast as a perfect overlap."""
    equal = np.full(10 * 20, 100.0)
    both = colocated(equal, batch=10, slots=20, costs=Costs(token=0.01, train_token=0.0005))
    assert both == pytest.approx(equal.sum() / (20 * (1.0 + 0.5)))  # ten slots stay empty: a tail cannot be split
    filled = np.full(20 * 20, 100.0)
    assert colocated(filled, batch=20, slots=10, costs=PLAIN) == pytest.approx(filled.sum() / (20 * (2.0 + 2.0)))


def test_lengths_follow_the_options() -> None:
    rng = np.random.default_rng(0)
    drawn = async_sim.lognormal_lengths(20_000, median=500.0, sigma=0.7, longest=10**6, rng=rng)
    assert np.median(drawn) == pytest.approx(500, rel=0.03)
    assert async_sim.fitted_sigma(drawn) == pytest.approx(0.7, rel=0.03)
    cut = async_sim.lognormal_lengths(1000, median=500.0, sigma=2.0, longest=800, rng=rng)
    assert cut.max() == 800 and cut.min() >= 1


def test_measured_lengths_are_resampled(tmp_path: Path) -> None:
    run_dir = shutil.copytree(ROOT / "trl_offpolicy" / "diagnosis" / "report" / "demo_run", tmp_path / "run")
    seen = async_sim.measured_lengths(run_dir)
    drawn = async_sim.drawn_lengths(async_sim.parse(["--rollouts", str(run_dir)]), 4000)
    assert set(drawn) <= set(seen) and drawn.mean() == pytest.approx(seen.mean(), rel=0.03)
    scaled = async_sim.drawn_lengths(async_sim.parse(["--rollouts", str(run_dir), "--median", "2000"]), 4000)
    assert np.median(scaled) == pytest.approx(2000, rel=0.05)
    long = async_sim.drawn_lengths(async_sim.parse(["--long_tail", "0.1", "--sigma", "0.1"]), 4000)
    assert (long > 10_000).mean() == pytest.approx(0.1, abs=0.02)
    with pytest.raises(FileNotFoundError, match=r"must hold rollouts\.parquet"):
        async_sim.measured_lengths(tmp_path)


def test_costs_of_a_machine() -> None:
    """7e9 parameters: 14e9 bytes of weights and 64 slots of cache a decode step; 8 P flops a trained token."""
    args = async_sim.parse([])
    costs = async_sim.costs_of(args, learners=4, mean_length=2000.0)
    assert costs.token == pytest.approx((14e9 + 64 * 57344 * 1000) / (3.35e12 * 0.6))
    assert costs.train_token == pytest.approx(8 * 7e9 / (989e12 * 0.35 * 4))
    assert costs.sync == pytest.approx(14 / 25)


def test_the_split_balances_both_sides() -> None:
    """At the balance, a token costs the samplers as long as the learner."""
    args = async_sim.parse([])
    drawn = async_sim.drawn_lengths(args, 4096)
    split = async_sim.split_gpus(args, 1024, drawn)
    assert split.learners + split.samplers == 1024
    assert split.costs.token / split.slots == pytest.approx(split.costs.train_token, rel=0.01)
    small = async_sim.split_gpus(async_sim.parse(["--replica", "4", "--learners", "0.9"]), 8, drawn)
    assert (small.learners, small.samplers) == (4, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Schedule(eta=-1), "eta must be at least 0, but got -1"),
        (lambda: Schedule(eta=2, barrier=True), "eta must be 1 with barrier=True, but got 2"),
        (lambda: Schedule(eta=1, order="random"), "order must be 'submitted' or 'finished'"),
        (lambda: run(0, Schedule(eta=1), batch=7), "multiple of batch = 7"),
        (lambda: run(0, Schedule(eta=1), slots=0), "slots must be at least 1"),
        (lambda: run(0, Schedule(eta=1, queue=8)), "queue must be at least batch = 16, but got 8"),
    ],
)
def test_impossible_settings_are_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_entry_point_prints_the_table_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg = tmp_path / "sim.svg"
    options = ["--gpus", "8", "32", "--batch", "64", "--steps", "6", "--eta", "1", "4", "--svg", str(svg)]
    assert async_sim.main(options) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith(("| 8", "| 32"))]
    assert [row[2].strip() for row in rows] == ["synchronous", "colocated", "one step", "eta 1", "eta 4"] * 2
    assert all(len(row) == 9 for row in rows) and float(rows[0][3]) == 1.0 < float(rows[4][3])
    ElementTree.parse(svg)
    assert "mean lag" in svg.read_text()
