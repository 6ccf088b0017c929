"""Fixtures shared by all tests. Those that need transformers or trl import them when they are asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from known_runs import rollout_parts, write_run  # noqa: F401
from other_digits import OtherDigits
from triton_interpreter import interpreter_environment

# no tests; they import Triton and verl
collect_ignore = ["triton_interpreter", "integrations/verl_on_cpu.py", "integrations/verl_vllm_on_cpu.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--vllm-v2", action="store_true", help="vLLM's Model Runner V2 on this CPU, in Triton's interpreter (slow)"
    )
    parser.addoption(
        "--other-digits",
        type=int,
        metavar="SEED",
        help="perturb float32 products and softmax by a rounding error, as another CPU would",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before anything imports Triton; processes that tests start inherit it."""
    if config.getoption("--vllm-v2"):
        if find_spec("triton") is None:
            raise pytest.UsageError("--vllm-v2 needs the package triton: pip install -r constraints/slow.txt --no-deps")
        environment = interpreter_environment(Path(mkdtemp(prefix="triton-interpreter-")))
        os.environ.update(environment)
        sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
        from triton_interpreter.gaps import close_gaps

        close_gaps()


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    """One, as the tensors here are tiny. OMP_NUM_THREADS may ask for more, up to this process's share of the cores.

    More threads than cores wait for each other: two times two on two cores take four times as long.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    share = max(1, (os.cpu_count() or 1) // processes)
    torch.set_num_threads(min(share, int(os.environ.get("OMP_NUM_THREADS", "1"))))


@pytest.fixture(autouse=True)
def _other_digits(request: pytest.FixtureRequest) -> Iterator[None]:
    """Under ``--other-digits``, the last digits of another machine."""
    seed = request.config.getoption("--other-digits")
    with nullcontext() if seed is None else OtherDigits(seed=seed):
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The word tokenizer of the tiny models."""
    from tiny_models import tiny_tokenizer

    return tiny_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``model_folder(kind)``: a saved tiny model with its tokenizer, made once a session."""
    from tiny_models import save_tiny_model

    known: dict[str, Path] = {}

    def folder(kind: str = "llama") -> Path:
        if kind not in known:
            known[kind] = save_tiny_model(tmp_path_factory.mktemp(kind), kind)  # type: ignore[arg-type]
        return known[kind]

    return folder


@pytest.fixture(scope="session")
def fresh_model(model_folder: Callable[[str], Path]) -> Callable[[str], Any]:
    """``fresh_model(kind)``: a new copy with the same weights at every call (a trainer patches its model)."""
    from copy import deepcopy

    from transformers import AutoModelForCausalLM

    known: dict[str, Any] = {}

    def model(kind: str = "llama") -> Any:
        if kind not in known:
            known[kind] = AutoModelForCausalLM.from_pretrained(model_folder(kind))
        return deepcopy(known[kind])

    return model


@pytest.fixture
def make_args(tmp_path: Path) -> Callable[..., Any]:
    """``make_args(**options)``: two optimizer steps of 8 completions, everything else as small as it can be."""
    from trainer_runs import tiny_options

    from trl_offpolicy.trl.config import OffPolicyGRPOConfig

    def args(**options: Any) -> Any:
        quick = {"learning_rate": 1e-3, "max_steps": 2, "write_report": False, "noise_floor_steps": 0}
        return OffPolicyGRPOConfig(**tiny_options(tmp_path / "run", **{**quick, **options}))

    return args


@pytest.fixture
def build(make_args: Callable[..., Any], fresh_model: Callable[..., Any], tokenizer: Any) -> Callable[..., Any]:
    """``build(rollout_func=None, **options)``: a trainer that is ready to train."""
    from tiny_models import score_last_word, tiny_prompts

    from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

    def trainer(rollout_func: Any = None, **options: Any) -> Any:
        return OffPolicyGRPOTrainer(
            fresh_model(),
            score_last_word,
            make_args(**options),
            train_dataset=tiny_prompts(),
            eval_dataset=tiny_prompts(1),
            processing_class=tokenizer,
            rollout_func=rollout_func,
        )

    return trainer
