"""The hooks of prime-rl, SkyRL and slime in those frameworks' own loss code, equal to the frameworks' own correction.

Their sources are not on PyPI: PRIME_RL_SOURCE, SKYRL_SOURCE and SLIME_SOURCE name checkouts (559b44772, a9564572e,
624b824a8), VERL_PYTHON a Python with torch, ray, jaxtyping, beartype, loguru, prime-pydantic-config, wandb and
megatron-core.
"""

import os
import socket
from pathlib import Path

import pytest
import torch
from verl_process import HERE, PYTHON, answer, start

pytestmark = pytest.mark.slow

FOLDERS = {
    "prime-rl": ("PRIME_RL_SOURCE", ("src", "packages/prime-rl-configs/src")),
    "skyrl": ("SKYRL_SOURCE", (".", "skyrl-gym")),
    "slime": ("SLIME_SOURCE", (".", "examples/train_infer_mismatch_helper")),
}


def answers(framework, *arguments, ranks=1):
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
        start("run_frameworks.py", framework, *arguments, **shared, RANK=str(rank), WORLD_SIZE=str(ranks))
        for rank in range(ranks)
    ]
    found = [answer(process) for process in started]
    return found[0]


def assert_same_gradients(cases):
    for name, case in cases.items():
        gradient, expected = (torch.tensor(case[side]["gradient"]) for side in ("kit", "theirs"))
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        assert gradient.abs().max() > 1e-4, name


def test_prime_rl():
    found = answers("prime-rl")
    assert len(found["cases"]) == 6
    assert_same_gradients(found["cases"])
    for name, case in found["cases"].items():
        assert case["kit"]["loss"] == pytest.approx(case["theirs"]["loss"], rel=1e-5, abs=1e-6), name
    assert found["rows"] == found["step"] == 1 and found["kl_k3"] > 0.01
    assert len({tuple(case["kit"]["metrics"]) for case in found["cases"].values()}) == 1  # the same keys on every rank


def test_skyrl():
    cases = answers("skyrl")["cases"]
    assert len(cases) == 12
    assert_same_gradients(cases)
    for name, case in cases.items():
        assert case["kit"]["loss"] == pytest.approx(case["theirs"]["loss"], rel=1e-5, abs=1e-6), name
    metrics = cases["token token_mean"]
    assert metrics["kit"]["metrics"]["offpolicy/weight/truncated_fraction"] == pytest.approx(
        metrics["theirs"]["metrics"]["tis_token_clip_high_ratio"]
    )


@pytest.mark.parametrize(("ranks", "prompt"), [(1, 2), (2, 2), (2, 30)])
def test_slime_with_whole_responses_and_with_context_parallel_parts(ranks, prompt):
    """After 30 tokens of prompt rank 0 holds every response whole, and rank 1 nothing."""
    cases = answers("slime", prompt, ranks=ranks)["cases"]
    assert len(cases) == 5
    assert_same_gradients(cases)
    for name, case in cases.items():
        assert case["kit"]["loss"] == pytest.approx(case["theirs"]["loss"], rel=1e-5, abs=1e-6), name
        assert "offpolicy/mismatch/kl_k3" in case["kit"]["metrics"]
