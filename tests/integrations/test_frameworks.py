"""The hooks of prime-rl, SkyRL, slime and miles in those frameworks' own loss code, equal to their own correction.

Their sources are not on PyPI: PRIME_RL_SOURCE, SKYRL_SOURCE, SLIME_SOURCE and MILES_SOURCE name checkouts (559b44772,
a9564572e, 624b824a8, 31f1ca961), VERL_PYTHON a Python with torch, ray, jaxtyping, beartype, loguru,
prime-pydantic-config, wandb and megatron-core.
"""

import os
import socket
from pathlib import Path

import pytest
import torch
from integrations.made_up import flat_tensors
from verl_process import HERE, PYTHON, answer, start

from trl_offpolicy.diagnosis.doctor import examine
from trl_offpolicy.run_folder.run_data import read_metrics, read_run_info

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FOLDERS = {
    "prime-rl": ("PRIME_RL_SOURCE", ("src", "packages/prime-rl-configs/src")),
    "skyrl": ("SKYRL_SOURCE", (".", "skyrl-gym")),
    "slime": ("SLIME_SOURCE", (".", "examples/train_infer_mismatch_helper")),
    "miles": ("MILES_SOURCE", (".", "examples/infra_features/train_infer_mismatch_helper")),
}


def answers(framework, run, *arguments, ranks=1):
    """``{case: {"theirs": ..., "kit": ...}}`` of rank 0; the kit's runs are written below the folder ``run``."""
    variable, folders = FOLDERS[framework]
    source = os.environ.get(variable)
    if PYTHON is None or source is None:
        pytest.skip(f"{variable} and VERL_PYTHON must name a checkout of {framework} and a Python that can import it")
    paths = [str(HERE.parents[1]), *(str(Path(source, folder)) for folder in folders)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"PYTHONPATH": os.pathsep.join(paths), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        start("run_frameworks.py", framework, run, *arguments, **shared, RANK=str(rank), WORLD_SIZE=str(ranks))
        for rank in range(ranks)
    ]
    found = [answer(process) for process in started]
    return found[0]


def assert_same(cases, count):
    """The framework's loss and gradient in every case."""
    assert len(cases) == count
    for name, case in cases.items():
        gradient, expected = (torch.tensor(case[side]["gradient"]) for side in ("kit", "theirs"))
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        assert gradient.abs().max() > 1e-4, name
        assert case["kit"]["loss"] == pytest.approx(case["theirs"]["loss"], rel=1e-5, abs=1e-6), name


def k3(first, second):
    """exp(x) - x - 1 of each trainable token, where x = log first - log second."""
    given = flat_tensors()
    log_ratio = (given[first] - given[second])[given["mask"].bool()]
    return log_ratio.exp() - 1 - log_ratio


def assert_recorded(run, trainer, *, steps=1):
    """A row for each step, with the mean over all tokens, and a folder that the doctor reads."""
    rows = read_metrics(run).rows
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        assert row["offpolicy/mismatch/kl_k3"] == pytest.approx(k3("old", "sampling").mean().item(), rel=1e-4)
    assert read_run_info(run)["trainer"] == trainer
    assert examine(run).frameworks == ("trl-offpolicy",)


@pytest.mark.parametrize("ranks", [1, 2])
def test_prime_rl(tmp_path, ranks):
    """On two ranks with its own cut and gather of context parallelism."""
    run = tmp_path / "run"
    cases = answers("prime-rl", run, ranks=ranks)
    assert_same(cases, 6)
    assert len({tuple(case["kit"]["metrics"]) for case in cases.values()}) == 1  # the same keys on every rank
    rows = read_metrics(run).rows
    assert len(rows) == 1 and rows[0]["step"] == 1
    all_of = k3("current", "sampling")
    weighted = all_of[5:]  # half of the calls leave out the first response, which has five trainable tokens
    expected = (all_of.sum() + weighted.sum()) / (len(all_of) + len(weighted))
    assert rows[0]["offpolicy/total/kl_k3"] == pytest.approx(expected.item(), rel=1e-4)
    assert examine(run).frameworks == ("trl-offpolicy",)


@pytest.mark.parametrize("ranks", [1, 2])
def test_skyrl(tmp_path, ranks):
    """On two ranks with its own cut and gather of Ulysses' sequence parallelism."""
    cases = answers("skyrl", tmp_path, ranks=ranks)
    assert_same(cases, 12)
    metrics = cases["token token_mean"]
    assert metrics["kit"]["metrics"]["offpolicy/weight/truncated_fraction"] == pytest.approx(
        metrics["theirs"]["metrics"]["tis_token_clip_high_ratio"]
    )
    assert_recorded(tmp_path / "token", "SkyRL", steps=2)  # one for each reduction
    row = read_metrics(tmp_path / "token").rows[0]
    assert row["offpolicy/staleness/kl_k3"] == pytest.approx(k3("current", "old").mean().item(), rel=1e-4)


@pytest.mark.parametrize(("ranks", "prompt"), [(1, 2), (2, 2), (2, 30)])
def test_slime_with_whole_responses_and_with_context_parallel_parts(tmp_path, ranks, prompt):
    """After 30 tokens of prompt rank 0 holds every response whole, and rank 1 nothing."""
    cases = answers("slime", tmp_path, prompt, ranks=ranks)
    assert_same(cases, 6)
    for case in cases.values():
        assert "offpolicy/mismatch/kl_k3" in case["kit"]["metrics"]
    assert_recorded(tmp_path / "measured", "slime")
    assert_recorded(tmp_path / "truncate", "slime")


def test_miles(tmp_path):
    cases = answers("miles", tmp_path)
    assert_same(cases, 6)
    for case in cases.values():
        assert "offpolicy/mismatch/kl_k3" in case["kit"]["metrics"]
    assert_recorded(tmp_path / "measured", "miles")
    assert_recorded(tmp_path / "truncate", "miles")
