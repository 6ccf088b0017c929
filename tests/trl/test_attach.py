"""trl_offpolicy.attach on stock TRL trainers: the same loss and weights bit for bit, and everything measured."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from tiny_models import score_last_word, tiny_prompts
from trainer_runs import Engine, records, rollouts, tiny_options

import trl_offpolicy as op
from trl_offpolicy.trl.attach import NOT_WATCHED
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

pytestmark = pytest.mark.integration

Stock = Callable[..., trl.GRPOTrainer]


@pytest.fixture
def stock(tmp_path: Path, fresh_model: Callable[..., Any], tokenizer: Any) -> Stock:
    """``stock(rollout_func, **options)``: TRL's own trainer on the tiny model."""

    def trainer(rollout_func: Any = None, folder: str = "run", **options: Any) -> trl.GRPOTrainer:
        return trl.GRPOTrainer(
            fresh_model(),
            score_last_word,
            trl.GRPOConfig(**tiny_options(tmp_path / folder, **{"learning_rate": 1e-2, "max_steps": 3, **options})),
            train_dataset=tiny_prompts(),
            eval_dataset=tiny_prompts(1),
            processing_class=tokenizer,
            rollout_func=rollout_func,
        )

    return trainer


def losses_and_gradients(trainer: trl.GRPOTrainer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Train; the loss of every micro-batch and the gradients of every step, in full precision."""
    losses, gradients = [], []
    training_step, clip = trainer.training_step, trainer._clip_grad_norm

    def step(*args: Any, **kwargs: Any) -> torch.Tensor:
        losses.append(training_step(*args, **kwargs))
        return losses[-1]

    def clipped(model: Any) -> Any:
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone())
        return clip(model)

    trainer.training_step, trainer._clip_grad_norm = step, clipped
    trainer.train()
    return losses, gradients


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steps_per_generation": 4},
        {"num_iterations": 2, "beta": 0.1},
        {"loss_type": "grpo", "epsilon_high": 0.3, "off_policy_mask_threshold": 0.1},
        {"importance_sampling_level": "sequence", "top_entropy_quantile": 0.5, "mask_truncated_completions": True},
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_loss_gradients_and_weights_stay_trls_bit_for_bit(stock: Stock, options: dict[str, Any]) -> None:
    alone = stock(Engine(noise=0.3), "alone", **options)  # seeds
    expected = losses_and_gradients(alone)
    watched = stock(Engine(noise=0.3), "watched", **options)
    op.attach(watched, write_report=False)
    actual = losses_and_gradients(watched)
    for wanted, got in zip(expected, actual, strict=True):
        assert len(wanted) == len(got) >= 3 and all(map(torch.equal, wanted, got))
    for (name, wanted), got in zip(alone.model.named_parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(wanted, got), name
    logged = [
        {key: value for key, value in row.items() if key in alone.state.log_history[0]} for row in records(watched)
    ]
    for row, reference in zip(logged, alone.state.log_history, strict=False):
        same = {key: value for key, value in reference.items() if "time" not in key}
        assert {key: row[key] for key in same} == same


def test_the_random_numbers_are_untouched(stock: Stock) -> None:
    """transformers' generate draws from the global state: the same completions with and without."""
    alone = stock(None, "alone")
    alone.train()
    watched = stock(None, "watched")
    op.attach(watched, write_report=False)
    watched.train()
    for wanted, got in zip(alone.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(wanted, got)


@pytest.mark.parametrize("options", [{}, {"steps_per_generation": 4}, {"num_iterations": 2, "beta": 0.1}])
def test_it_measures_what_the_kits_own_trainer_measures(
    stock: Stock, build: Callable[..., OffPolicyGRPOTrainer], options: dict[str, Any]
) -> None:
    """Same rollouts, no correction on either side: every number of the same name is the same."""
    watched = stock(Engine(noise=0.3), "stock", **options)
    op.attach(watched, write_report=False)
    watched.train()
    ours = build(Engine(noise=0.3), offpolicy="measure", max_steps=3, learning_rate=1e-2, **options)
    ours.train()
    for theirs, mine in zip(records(watched), records(ours), strict=True):
        shared = [key for key in theirs if key.startswith("offpolicy/") and key in mine]
        assert len(shared) > 80
        for key in shared:
            assert theirs[key] == pytest.approx(mine[key], rel=2e-3, abs=1e-5), key


def test_a_known_mismatch_and_the_run_folder(stock: Stock, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = stock(Engine(shift=0.5))
    op.attach(trainer)
    trainer.train()
    rows = records(trainer)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["offpolicy/mismatch/kl_k1"] == pytest.approx(0.5, abs=1e-5)
        assert row["offpolicy/control/verdict"] == 3 and row["offpolicy/gradient/signal"] > 0
        assert "offpolicy/weight_applied/mean" not in row  # nothing is corrected
    folder = Path(trainer.args.output_dir)
    frame = rollouts(trainer)
    assert len(frame) == 3 * 8 and frame.reward.notna().all() and set(frame.group_id) == set(range(6))
    assert json.loads((folder / "run.json").read_text())["preset"] == "stock TRL, measured by trl_offpolicy.attach"
    said = capsys.readouterr().out
    assert "[control] step 1: critical" in said and (folder / "report.html").exists()


def test_trls_own_correction_is_shown_as_it_is(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ratio multiplies TRL's loss; mismatch stays raw, weight_applied is what TRL applied."""
    trainer = stock(Engine(shift=0.5))
    trainer.args.use_vllm = True
    trainer.args.vllm_importance_sampling_mode, trainer.args.vllm_importance_sampling_clip_max = "token_truncate", 3.0
    observer = op.attach(trainer, write_report=False)
    assert observer.objective.correction.weights == (op.TruncateWeight(level="token", max_weight=3.0),)
    trainer.args.use_vllm = False
    trainer.train()
    for row in records(trainer):
        assert row["offpolicy/mismatch/kl_k1"] == pytest.approx(0.5, abs=1e-5)
        assert row["offpolicy/weight_applied/mean"] == pytest.approx(math.exp(-0.5), abs=1e-5)


def test_stop_ends_the_run(stock: Stock) -> None:
    trainer = stock(Engine(noise=2.0), max_steps=8)
    op.attach(trainer, control={"policy": "stop", "patience": 2}, write_report=False)
    trainer.train()
    assert trainer.state.global_step == 2 and (Path(trainer.args.output_dir) / "checkpoint-2").is_dir()


def test_a_step_of_cut_responses_is_no_broken_engine(stock: Stock) -> None:
    """Every completion is cut, so that no token is left to compare."""

    class Cut(Engine):
        def _words(self) -> list[int]:
            return super()._words()[:2]  # without the end

    trainer = stock(Cut(noise=0.3), mask_truncated_completions=True)
    op.attach(trainer, control={"policy": "stop", "patience": 1}, write_report=False)
    trainer.train()
    rows = records(trainer)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert not any(key.startswith("offpolicy/mismatch/") for row in rows for key in row)


def test_without_an_engine_it_says_so(stock: Stock, caplog: pytest.LogCaptureFixture) -> None:
    trainer = stock()
    op.attach(trainer, write_report=False)
    trainer.train()
    assert caplog.text.count("the mismatch cannot be measured") == 1
    assert all("offpolicy/mismatch/kl_k3" not in row for row in records(trainer))
    assert all(row["offpolicy/rollout/response_length_mean"] > 0 for row in records(trainer))


def test_a_batch_that_cannot_be_measured_costs_nothing(stock: Stock, caplog: pytest.LogCaptureFixture) -> None:
    trainer = stock(Engine())
    observer = op.attach(trainer, write_report=False, control=None)
    observer._row_counter.fields = lambda *_: {"group_ids": torch.zeros(8)}  # not whole numbers
    trainer.train()
    assert trainer.state.global_step == 3 and "a micro-batch is not measured: " in caplog.text


def test_evaluation_is_measured_too(stock: Stock) -> None:
    trainer = stock(Engine(shift=0.25))
    op.attach(trainer, write_report=False)
    metrics = trainer.evaluate()
    assert trainer.state.log_history[-1]["eval_offpolicy/mismatch/kl_k1"] == pytest.approx(0.25, abs=1e-5), metrics


def test_detach_leaves_the_trainer_as_it_was(stock: Stock) -> None:
    trainer = stock(Engine())
    before, callbacks = set(vars(trainer)), list(trainer.callback_handler.callbacks)
    op.attach(trainer).detach()
    assert set(vars(trainer)) == before and trainer.callback_handler.callbacks == callbacks
    trainer.train()
    assert not (Path(trainer.args.output_dir) / "metrics.jsonl").exists()


def test_what_cannot_be_attached_is_refused(stock: Stock, build: Callable[..., OffPolicyGRPOTrainer]) -> None:
    with pytest.raises(TypeError, match=r"a trl\.GRPOTrainer or a trl\.RLOOTrainer, but got str, whose batches"):
        op.attach("trainer")
    with pytest.raises(ValueError, match="but got an OffPolicyGRPOTrainer"):
        op.attach(build(Engine()))
    trainer = stock(Engine())
    with pytest.raises(ValueError, match="control must be warn, stop or off, but got act"):
        op.attach(trainer, control="act")
    op.attach(trainer)
    with pytest.raises(ValueError, match="must not be attached twice"):
        op.attach(trainer)


# ------------------------------------------------------------------------------------------------ other trainers of TRL

TRL_SOURCE = Path(trl.__file__).parent
DOCS = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"


@pytest.mark.parametrize(
    ("module", "name", "reason"),
    [
        ("async_grpo", "AsyncGRPOTrainer", r"has the engine's log-probs, .*: trl_offpolicy\.async_grpo measures"),
        ("sdpo", "SDPOTrainer", r"asks vLLM for no log-probs"),
        ("iw_opd", "IWOPDTrainer", r"engine's log-probs are part of its advantage"),
        ("online_dpo", "OnlineDPOTrainer", r"learns which of two samples is preferred: no ratio to the sampler"),
        ("gkd", "GKDTrainer", r"a teacher's distribution"),  # TRL makes it from its SFTTrainer
    ],
)
def test_another_trainer_is_refused_with_its_own_reason(module: str, name: str, reason: str) -> None:
    cls = getattr(import_module(f"trl.experimental.{module}"), name)
    own = type("Own", (cls,), {})
    for one in (cls, own):
        with pytest.raises(TypeError, match=f"but got {one.__name__}, .*{reason}"):
            op.attach(object.__new__(one))


def test_what_is_lightnings_is_sent_to_the_observer() -> None:
    import lightning.pytorch as pl

    own = type("Own", (pl.LightningModule,), {})
    for one in (own(), pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)):
        with pytest.raises(TypeError, match=rf"but got {type(one).__name__}, .*lightning_module\.OffPolicyObserver"):
            op.attach(one)


def test_the_reasons_are_of_trainers_that_trl_has_and_the_page_lists() -> None:
    source = "\n".join(path.read_text() for path in TRL_SOURCE.rglob("*_trainer.py"))
    page = DOCS.read_text()
    for name in NOT_WATCHED:
        assert f"class {name}(" in source and f"`{name}`" in page, name
    asks = TRL_SOURCE / "experimental" / "sdpo" / "sdpo_trainer.py", TRL_SOURCE / "experimental" / "iw_opd"
    assert "logprobs=None" in asks[0].read_text()  # what is said of the two, as TRL has it
    assert 'logprobs=0 if args.distillation_objective == "iw_opd"' in (asks[1] / "iw_opd_trainer.py").read_text()


WATCHED = {"GRPOTrainer", "RLOOTrainer"}
MADE_FROM_WATCHED = {"GMPOTrainer"}
"""Experimental trainers that are a GRPOTrainer and have its batches."""


def trainers_of_trl() -> dict[str, list[str]]:
    """The trainer classes in TRL's sources, with the names of their bases."""
    found = {}
    for folder in ("trainer", "experimental"):
        for path in (TRL_SOURCE / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and node.name.endswith("Trainer") and not node.name.startswith("_"):
                    found[node.name] = [ast.unparse(base) for base in node.bases]
    return found


def test_every_trainer_of_trl_is_watched_or_has_a_reason() -> None:
    found = trainers_of_trl()
    assert len(found) > 20 and found.keys() >= WATCHED | MADE_FROM_WATCHED

    def is_known(name: str) -> bool:
        known = WATCHED | MADE_FROM_WATCHED | NOT_WATCHED.keys()
        return name in known or any(is_known(base) for base in found.get(name, []))

    unknown = sorted(name for name in found if not is_known(name))
    assert not unknown
