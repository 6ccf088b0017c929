"""Sampling ahead under Lightning, behind a server that answers at once or when it is cut: equal to TRL's run."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from both_trainers import ENGINE_ONLY, PROMPTS, WatchTRL, assert_same_numbers, distance
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning_runs import Watch, data, module, trainer
from rollouts.ahead.fake_server import FakeServer, lags_by_step, note_submissions, server_class
from tiny_models import score_last_word
from trainer_runs import records

from lightning_module import RunFolder, engines
from trl_offpolicy.rollouts.ahead.old_policy import WeightAverage
from trl_offpolicy.trl import engine as trl_engines
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

pytestmark = pytest.mark.integration

STEPS, RATE = 5, 0.02
SERVER = {"type": "server", "base_url": "http://127.0.0.1:1"}
WAIT = "offpolicy/rollout/wait_seconds"
LIMIT = 1e-5


class Run:
    """What a run under Lightning left behind."""

    def __init__(self, watch: Watch, server: FakeServer, folder: Path) -> None:
        self.watch, self.server, self.logs = watch, server, watch.logs
        self.rollouts = pd.read_parquet(folder / "rollouts.parquet")

    @property
    def lags(self) -> list[list[int]]:
        """By optimizer step: the lags of the rows' tokens, without repetition."""
        return lags_by_step(self.rollouts)

    @property
    def groups(self) -> list[set[str]]:
        """The prompts of every generation batch that was learned from, in order."""
        return [set(part.prompt) for _, part in self.rollouts.groupby("step")]


@pytest.fixture
def run(fresh_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Run]:
    """``run(async_rollouts, server=..., sizes=..., flags=..., **module_options)``, two micro-batches a generation."""
    note_submissions(monkeypatch)

    def train(
        ahead: Any,
        *,
        server: dict[str, Any] | None = None,
        sizes: dict[str, Any] | None = None,
        flags: dict[str, Any] | None = None,
        folder: str = "lightning",
        resume: Path | None = None,
        **options: Any,
    ) -> Run:
        made: list[FakeServer] = []
        monkeypatch.setattr(engines, "ServerEngine", server_class(fresh_model(), made, **(server or {})))
        watch, place = Watch(), tmp_path / folder
        callbacks = [watch, RunFolder(str(place), report=False), *(flags or {}).pop("callbacks", [])]
        settings = {"max_steps": STEPS, "accumulate_grad_batches": 2, **(flags or {})}
        sgd = partial(torch.optim.SGD, lr=RATE)
        given = {"correction": "paper/tis", "optimizer": sgd, "control": "off", **options}
        ours = module(SERVER, async_rollouts=ahead, **given)
        owner = trainer(place, callbacks=callbacks, **settings)
        owner.fit(ours, data(PROMPTS, **{"steps_per_generation": 2, **(sizes or {})}), ckpt_path=resume)
        return Run(watch, made[0], place)

    return train


@pytest.fixture
def run_trl(
    make_args: Any, fresh_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[WatchTRL, list[dict[str, Any]], FakeServer]]:
    """TRL's side: same optimizer, prompts and server."""
    same = {
        "use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": SERVER["base_url"],
        "engine": {"check_sync": False, "transfer": "folder"}, "optim": "sgd", "learning_rate": RATE,
        "lr_scheduler_type": "constant", "max_steps": STEPS, "max_grad_norm": 1e9, "shuffle_dataset": False,
        "control": None, "offpolicy": "paper/tis",
    }  # fmt: skip

    def train(
        ahead: Any, server: dict[str, Any] | None = None, **options: Any
    ) -> tuple[WatchTRL, list[dict[str, Any]], FakeServer]:
        made: list[FakeServer] = []
        monkeypatch.setattr(trl_engines, "ServerEngine", server_class(fresh_model(), made, **(server or {})))
        theirs = OffPolicyGRPOTrainer(
            fresh_model(), score_last_word, make_args(async_rollouts=ahead, **{**same, **options}),
            train_dataset=PROMPTS, processing_class=tokenizer,
        )  # fmt: skip
        watch = WatchTRL(theirs.model)
        theirs.add_callback(watch)
        theirs.train()
        return watch, records(theirs), made[0]

    return train


CUT = {"free": 2, "before_cut": 3}
HALVES = {"steps_per_generation": 4}, {"steps_per_generation": 4}  # two optimizer steps a generation
WIDE = {"preset": "paper/tis", "correction": {"normalize": "original"}}
CASES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # async_rollouts, server, TRL's options, the data's, the module's
    "lag_1": (1, None, {}, {}, {}),
    "half_a_lag": (0.5, None, {}, {}, {}),
    "cut_at_a_sync": (2, CUT, {}, {}, {}),
    "snapshots": ({"lag": 2, "old_logps": "snapshot"}, CUT, {}, {}, {}),
    "own_model": ({"lag": 2, "old_logps": "model"}, CUT, {}, {}, {}),
    "balance": ({"lag": 2, "old_logps": "balance"}, CUT, {}, {}, {}),
    "average": ({"lag": 1, "old_logps": "ewma", "ewma_decay": 0.5}, None, {}, {}, {}),
    "two_steps_a_generation": (1, None, *HALVES, {}),
    "two_steps_and_snapshots": ({"lag": 1, "old_logps": "snapshot"}, None, *HALVES, {}),
    "every_row_twice": (1, None, {"num_iterations": 2}, {"num_iterations": 2}, {}),
    "wide_scope": (1, None, {"offpolicy": WIDE}, {}, {"correction": WIDE}),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_and_numbers_are_those_of_trl(
    case: str, run: Any, run_trl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, server, options, sizes, ours = CASES[case]
    monkeypatch.setattr(torch, "randperm", lambda count, **_: torch.arange(count))  # each trainer shuffles by itself
    theirs, rows, behind = run_trl(ahead, server, **options)
    seen = run(ahead, server=server, sizes=sizes, **ours)

    assert sorted(seen.server.asked) == sorted(behind.asked)  # what was asked for, and under which version
    assert seen.server.syncs == behind.syncs
    assert len(seen.logs) == len(rows) == STEPS
    for step in range(STEPS):
        assert distance(seen.watch.weights[step], theirs.weights[step]) < LIMIT
        assert (WAIT in seen.logs[step]) == (WAIT in rows[step])
        assert_same_numbers(compared(seen.logs[step]), compared(rows[step]))
    assert max(row["offpolicy/rollout/version_lag_max"] for row in rows) >= 1  # something is stale
    assert distance(seen.watch.weights[-1], theirs.weights[0]) > 100 * LIMIT


def compared(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in {*ENGINE_ONLY, WAIT}}


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_batch_is_learned_from_lag_generations_after_it_was_asked_for(run: Any, lag: int) -> None:
    seen = run({"lag": lag, "partial": "finish"})

    assert seen.lags == [[min(step, lag)] for step in range(STEPS)]
    assert seen.server.syncs == [0, 1, 2, 3, 4]
    prompts = [tuple(prompt) for prompt, _ in seen.server.asked]
    assert len(prompts) == len(set(prompts)) == STEPS * 2  # nothing twice, nothing for after the end
    assert [row["offpolicy/rollout/version_lag_mean"] for row in seen.logs] == [min(s, lag) for s in range(STEPS)]
    for step, row in enumerate(seen.logs):
        assert ("offpolicy/mismatch/kl_k3" in row) == (lag == 0 or step == 0)
        assert row[WAIT] >= 0.0


@pytest.mark.parametrize("name", [None, "paper/periodic-async"])
def test_periodic_asynchrony_asks_for_a_whole_step_and_is_never_stale(run: Any, name: str | None) -> None:
    """Four generations a step, lag 0: the later ones are sampled while the module learns from the first."""
    counts: list[int] = []

    class Count(Callback):
        def on_train_batch_end(self, _: Any, ours: Any, *rest: Any) -> None:
            counts.append(len(ours.generation.engine.submitted))

    flags = {"accumulate_grad_batches": 4, "callbacks": [Count()]}
    spec = {"ahead": 0} if name is None else {"ahead": None, "correction": name}
    found = run(sizes={"steps_per_generation": 1}, flags=flags, **spec)

    step = counts[0]
    assert counts == [step * (1 + at // 4) for at in range(4 * STEPS)]  # all of a step before its first loss
    assert found.server.syncs == list(range(STEPS))
    assert found.lags == [[0]] * STEPS


def test_a_cut_response_has_a_version_for_each_token(run: Any) -> None:
    seen = run(2, server=CUT)

    for row in seen.rollouts.itertuples():
        versions = row.policy_versions.tolist()
        assert versions == ([0] * 6 if row.step == 0 else [versions[0]] * 3 + [versions[0] + 1] * 3)
    assert (seen.rollouts.step - seen.rollouts.policy_version).max() == 2


def test_snapshots_of_an_adapter_give_the_old_policy(run: Any) -> None:
    """Rounding (the engine's adapter is merged, the trainer's is not) stays a thousandth of what an update changes."""
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 8}
    rate = {"optimizer": partial(torch.optim.SGD, lr=0.5)}
    first, *others = run({"lag": 1, "old_logps": "snapshot"}, adapter=lora, **rate).logs

    assert first["offpolicy/staleness/logp_diff_max"] == 0.0
    assert first["offpolicy/mismatch/logp_diff_max"] < 2e-5
    for row in others:
        of_an_update = row["offpolicy/staleness/logp_diff_max"]
        assert of_an_update > 0.1  # what the trainer's newest weights would show as a mismatch
        assert row["offpolicy/mismatch/logp_diff_max"] < 1e-3 * of_an_update


@pytest.mark.parametrize("adapter", [None, {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 8}])
def test_a_model_of_its_own_trains_as_exchanged_weights_do(run: Any, adapter: Any, tmp_path: Path) -> None:
    """Also when the run is resumed, with responses of two versions each."""
    rate = {"optimizer": partial(torch.optim.SGD, lr=0.02 if adapter is None else 2.0)}
    seen = {}
    for name in ("snapshot", "model"):
        ahead = {"lag": 2, "partial": "continue", "old_logps": name}
        saver = ModelCheckpoint(dirpath=tmp_path / name, every_n_train_steps=2, save_top_k=-1, filename="{step}")
        saving = {"callbacks": [saver], "enable_checkpointing": True}
        torch.manual_seed(0)
        whole = run(ahead, server=CUT, folder=f"{name}_whole", adapter=adapter, flags=saving, **rate)
        torch.manual_seed(0)
        resume = tmp_path / name / "step=2.ckpt"
        resumed = run(ahead, server=CUT, folder=f"{name}_resumed", adapter=adapter, resume=resume, **rate)
        seen[name] = whole, resumed
    for one, other in zip(seen["snapshot"], seen["model"], strict=True):
        assert one.lags == other.lags and max(map(max, one.lags)) == 2
        for step in range(len(one.logs)):
            assert_same_numbers(compared(other.logs[step]), compared(one.logs[step]))
        for name, value in one.watch.weights[-1].items():
            torch.testing.assert_close(other.watch.weights[-1][name], value, atol=1e-6, rtol=0.0, msg=name)
    assert seen["model"][0].logs[-1]["offpolicy/staleness/kl_k3"] > 1e-6


def test_the_end_of_an_epoch_or_of_the_run_is_not_looked_beyond(run: Any) -> None:
    seen = run(2, sizes={"shuffle": True}, flags={"limit_train_batches": 6, "max_steps": 5})

    assert seen.lags == [[0], [1], [2], [0], [1]]  # three generations an epoch
    assert len(seen.server.asked) == 5 * 2
    assert seen.groups[0] != seen.groups[3]


class Leave(Callback):
    """Ends the first epoch after its first optimizer step, and lets the run go on."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.current_epoch == 0 and trainer.global_step == 1

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = False


@pytest.mark.parametrize(
    ("partial", "server", "shuffle", "lags"),
    [
        ("finish", None, False, [[0], [0], [1], [2], [0]]),
        ("finish", None, True, [[0], [0], [1], [2], [0]]),
        ("continue", CUT, False, [[0], [0], [0, 1], [1, 2], [0]]),  # what is dropped is in flight
    ],
)
def test_an_epoch_that_a_callback_ends_leaves_nothing_behind(
    run: Any, partial: str, server: Any, shuffle: bool, lags: Any
) -> None:
    """One generation of the first epoch, three of the second, which begins with rows of its own weights."""
    flags = {"callbacks": [Leave()], "limit_train_batches": 6, "max_steps": 5}
    seen = run({"lag": 2, "partial": partial}, server=server, sizes={"shuffle": shuffle}, flags=flags)

    assert seen.lags == lags
    assert (seen.groups[0] == seen.groups[1]) is not shuffle


class Stop(Callback):
    """Ends the run after an optimizer step."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.global_step >= 1


def test_a_fit_after_one_that_was_stopped_begins_anew(
    fresh_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_submissions(monkeypatch)
    made: list[FakeServer] = []
    monkeypatch.setattr(engines, "ServerEngine", server_class(fresh_model(), made))
    ours = module(SERVER, async_rollouts={"lag": 2, "partial": "finish"}, correction="paper/tis", control="off")
    sizes = {"steps_per_generation": 2}
    trainer(tmp_path, callbacks=[Stop()], max_steps=STEPS, accumulate_grad_batches=2).fit(ours, data(PROMPTS, **sizes))
    folder = tmp_path / "second"
    callbacks = [Watch(), RunFolder(str(folder), report=False)]
    trainer(folder, callbacks=callbacks, max_steps=3, accumulate_grad_batches=2).fit(ours, data(PROMPTS, **sizes))

    assert Run(callbacks[0], made[-1], folder).lags == [[0], [1], [2]]


def test_validation_samples_in_turn(run: Any) -> None:
    held_out = {"val_dataset": PROMPTS.select(range(2)), "val_batch_size": 2}
    seen = run({"lag": 2, "partial": "finish"}, sizes=held_out, flags={"val_check_interval": 4})

    assert seen.lags == [[min(step, 2)] for step in range(STEPS)]
    assert len(seen.server.asked) == STEPS * 2


VALIDATIONS = [{}, {"num_sanity_val_steps": 1}, {"val_check_interval": 2}]
"""None, before training, and after each optimizer step."""


@pytest.mark.parametrize("old_logps", ["ewma", "snapshot"])
def test_validations_leave_the_old_policy_as_it_is(run: Any, monkeypatch: pytest.MonkeyPatch, old_logps: str) -> None:
    """A validation sends weights, too; training then finds them sent, and must average or copy them all the same."""
    versions: list[int] = []
    add = WeightAverage.add

    def adding(average: WeightAverage, model: Any, version: int) -> None:
        versions.append(version)
        add(average, model, version)

    monkeypatch.setattr(WeightAverage, "add", adding)
    ahead = {"lag": 1, "partial": "finish", "old_logps": old_logps}
    ahead |= {"ewma_decay": 0.5} if old_logps == "ewma" else {}
    held_out = PROMPTS.select(range(len(PROMPTS) - 2, len(PROMPTS)))  # the words for a prompt change with each request
    sizes, seen = {"val_dataset": held_out, "val_batch_size": 2}, []
    for number, flags in enumerate(VALIDATIONS):
        versions.clear()
        seen.append(run(ahead, sizes=sizes, flags={**flags}, folder=str(number)))
        assert seen[-1].server.syncs[:STEPS] == list(range(STEPS))
        assert versions == (list(range(STEPS)) if old_logps == "ewma" else [])

    for other in seen[1:]:
        for name, value in seen[0].watch.weights[-1].items():
            assert torch.allclose(other.watch.weights[-1][name], value, atol=1e-7), name


@pytest.mark.parametrize(
    ("stop", "sizes", "lags"),
    [
        (2, {}, [[0], [1], [0], [1], [2]]),
        (3, {"steps_per_generation": 4}, [[0], [1], [2], [3], [0]]),  # inside a generation, whose rows are restored
    ],
)
def test_a_checkpoint_resumes(run: Any, tmp_path: Path, stop: int, sizes: dict[str, Any], lags: Any) -> None:
    """What is in use goes on; what was in flight is asked for again, at the weights of the checkpoint."""
    ahead = {"lag": 2, "partial": "finish"} if not sizes else 1
    whole = run(ahead, sizes=sizes)
    saver = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=stop, save_top_k=-1, filename="{step}")
    saving = {"callbacks": [saver], "enable_checkpointing": True, "max_steps": stop}
    parts = run(ahead, sizes=sizes, folder="parts", flags=saving)
    resumed = run(ahead, sizes=sizes, folder="parts", resume=tmp_path / "saved" / f"step={stop}.ckpt")

    assert resumed.groups == whole.groups
    assert resumed.lags == lags
    assert len(resumed.logs) == STEPS - stop
    asked = {tuple(prompt) for prompt, _ in resumed.server.asked}
    assert all(version >= stop for _, version in resumed.server.asked)
    if sizes:
        before = {tuple(prompt) for prompt, _ in parts.server.asked}
        assert not asked & before  # nothing of the generation in use
        for name, value in whole.watch.weights[stop].items():  # the step on its second half
            assert torch.allclose(resumed.watch.weights[0][name], value, atol=1e-7), name


def test_the_average_of_the_weights_is_in_the_checkpoint(run: Any, tmp_path: Path) -> None:
    """In turn nothing is in flight, so a resumed run is the whole one, if its centre is the same average."""
    ahead = {"lag": 0, "old_logps": "ewma", "ewma_decay": 0.5}
    whole = run(ahead)
    saver = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    run(ahead, folder="parts", flags={"callbacks": [saver], "enable_checkpointing": True, "max_steps": 2})
    resumed = run(ahead, folder="parts", resume=tmp_path / "saved" / "step=2.ckpt")

    key = "clip_ratio/region_mean"
    assert [row[key] for row in resumed.logs] == pytest.approx([row[key] for row in whole.logs[2:]])
    assert max(row[key] for row in resumed.logs) > 0
    for name, value in whole.watch.weights[-1].items():
        assert torch.allclose(resumed.watch.weights[-1][name], value, atol=1e-7), name


def test_a_failed_request_stops_the_run(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("the network is gone")

    monkeypatch.setattr(FakeServer, "parts", fail)
    with pytest.raises(RuntimeError, match="A rollout could not be sampled: OSError: the network is gone"):
        run(1)


def test_rows_of_stale_steps_carry_no_old_log_probs_and_the_run_says_why(run: Any, tmp_path: Path) -> None:
    stale = run({"lag": 1}).rollouts.query("step > 0")

    assert stale.old_per_token_logps.map(lambda row: np.isnan(row).all()).all()
    description = json.loads((tmp_path / "lightning" / "run.json").read_text())
    assert description["async_rollouts"] == description["settings"]["async_rollouts"] == {"lag": 1}
