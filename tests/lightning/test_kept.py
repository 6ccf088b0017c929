"""Replay of the sampling mask under Lightning: an engine whose kept sets no rule of the trainer would give."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_runs import Played, Watch, data, module, trainer
from tiny_models import EOS, FIRST_WORD, VOCABULARY, tiny_model
from trainer_runs import LENGTH

from trl_offpolicy.engines.engine import Rollouts, Sampling
from trl_offpolicy.rollouts.kept import KEY

pytestmark = pytest.mark.integration

CUT = {"max_tokens": LENGTH, "top_k": 9}  # the trainer's own rule would keep the nine most likely tokens


class Chooser(Played):
    """Samples each token among a few that it draws by itself, and reports these; its log-probs are of them alone.

    Args:
        reports: "all", "none" or "some": every second completion.
    """

    def __init__(self, reports: str = "all") -> None:
        super().__init__([])
        self.reports = reports

    @torch.no_grad()
    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int = 1) -> Rollouts:
        self.chance = torch.Generator().manual_seed(sum(map(sum, prompt_ids)) + 1000 * (self.version or 0))
        prompts = [list(ids) for ids in prompt_ids for _ in range(n)]
        rows = [self._row(prompt) for prompt in prompts]
        known = {"all": 1, "some": 2, "none": len(rows) + 1}[self.reports]
        masks = [kept if i % known == 0 else None for i, (_, _, kept) in enumerate(rows)]
        return Rollouts(
            prompt_ids=prompts,
            completion_ids=[ids for ids, _, _ in rows],
            sampling_per_token_logps=[logps for _, logps, _ in rows],
            policy_versions=[[self.version or 0] * len(ids) for ids, _, _ in rows],
            finish_reasons=["stop"] * len(rows),
            sampling_mask=None if self.reports == "none" else masks,
        )

    def _row(self, prompt: list[int]) -> tuple[list[int], list[float], list[list[int]]]:
        ids: list[int] = []
        logps, kept = [], []
        length = int(torch.randint(2, LENGTH + 1, (), generator=self.chance))
        for place in range(length):
            last = place + 1 == length and length < LENGTH
            words = FIRST_WORD + torch.randperm(len(VOCABULARY) - FIRST_WORD, generator=self.chance)[:5]
            listed = sorted([EOS, *words.tolist()] if last else words.tolist())
            logits = self.source.model(input_ids=torch.tensor([prompt + ids])).logits[0, -1]
            among = logits[listed].log_softmax(-1)
            pick = 0 if last else int(torch.multinomial(among.exp(), 1, generator=self.chance))
            ids.append(listed[pick])
            logps.append(float(among[pick]))
            kept.append(listed)
        return ids, logps, kept


def fit(folder: Path, engine: Any, *, steps: int = 3, resume: Any = None, options: Any = None, **flags: Any) -> Any:
    watch = Watch()
    callbacks = [watch, *flags.pop("callbacks", [])]
    owner = trainer(folder, callbacks=callbacks, max_steps=steps, accumulate_grad_batches=2, **flags)
    rate = partial(torch.optim.SGD, lr=0.02)
    given = {"correction": "paper/tis", "sampling": CUT, "optimizer": rate, "share_prefix": True, **(options or {})}
    ours = module(engine, **given)
    sizes = {"steps_per_generation": 2} if options else {"steps_per_generation": 4}  # two optimizer steps a generation
    owner.fit(ours, data(**sizes), ckpt_path=resume, weights_only=True if resume else None)
    return watch, ours


def mean_ratio(row: dict[str, float], group: str = "mismatch") -> float:
    """E rho from two diagnostics: k3 - k1 = E[rho - 1]."""
    return 1.0 + row[f"offpolicy/{group}/kl_k3"] - row[f"offpolicy/{group}/kl_k1"]


def test_ratios_are_one_over_exactly_these_tokens_and_not_by_the_rule(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        watch, _ = fit(tmp_path, Chooser())
    first = watch.logs[0]
    assert first["offpolicy/mismatch/logp_diff_max"] < 1e-4
    assert mean_ratio(first) == pytest.approx(1.0, abs=1e-5)
    for row in watch.logs:
        assert 5 <= row["offpolicy/rollout/kept_ids_mean"] <= 6
        assert row["offpolicy/rollout/recomputed_cut_fraction"] == 0.0
        assert row["offpolicy/rollout/outside_fraction"] == 0.0
    assert watch.logs[2]["offpolicy/mismatch/logp_diff_max"] < 1e-4  # the next generation, at other weights
    assert caplog.text.count("renormalises over exactly these") == 1
    caplog.clear()
    ruled, _ = fit(tmp_path / "ruled", Chooser("none"))
    assert ruled.logs[0]["offpolicy/mismatch/logp_diff_mean"] > 0.3
    assert "offpolicy/rollout/kept_ids_mean" not in ruled.logs[0]
    assert caplog.text.count("(the engine does not report them)") == 1


def test_a_row_without_a_report_is_cut_by_the_rule_and_counted(tmp_path: Path) -> None:
    watch, _ = fit(tmp_path, Chooser("some"))
    row = watch.logs[0]
    assert 0.2 < row["offpolicy/rollout/recomputed_cut_fraction"] < 0.8
    assert row["offpolicy/mismatch/logp_diff_max"] > 0.3


def test_a_mask_of_another_row_is_noticed(tmp_path: Path) -> None:
    class Mixed(Chooser):
        def generate(self, *args: Any, **kwargs: Any) -> Rollouts:
            found = super().generate(*args, **kwargs)
            return Rollouts(**{**vars(found), "sampling_mask": [[[3]] * len(ids) for ids in found.completion_ids]})

    with pytest.raises(ValueError, match=r"sampling_mask must hold the token that was sampled"):
        fit(tmp_path, Mixed(), steps=1)


def test_old_log_probs_and_a_resume_inside_a_generation(tmp_path: Path) -> None:
    """One generation serves two steps: the rows and their kept ids are in the checkpoint."""
    saver = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=3, save_top_k=-1, filename="{step}")
    whole, _ = fit(tmp_path / "whole", Chooser(), steps=4, callbacks=[saver], enable_checkpointing=True)
    rest, ours = fit(tmp_path / "rest", Chooser(), steps=4, resume=tmp_path / "saved" / "step=3.ckpt")
    assert whole.logs[1]["offpolicy/mismatch/logp_diff_max"] < 1e-4  # old log-probs are of the kept tokens too
    assert whole.logs[1]["offpolicy/staleness/logp_diff_max"] > 1e-6
    assert KEY in ours.generation._buffer.micro_batches[0]
    assert rest.logs[-1]["offpolicy/rollout/kept_ids_mean"] == whole.logs[-1]["offpolicy/rollout/kept_ids_mean"]
    for name, value in whole.weights[-1].items():
        torch.testing.assert_close(rest.weights[-1][name], value)


def test_replayed_rows_bring_theirs_along(tmp_path: Path) -> None:
    """The weights hardly move, so what a replayed row's log-probs differ by would come from another set."""
    options = {"replay": {"groups": 2, "max_rows": 1000}, "optimizer": partial(torch.optim.SGD, lr=1e-4)}
    watch, _ = fit(tmp_path, Chooser(), options=options)
    assert watch.logs[1]["offpolicy/rollout/version_lag_max"] == 1
    for row in watch.logs:
        assert row["offpolicy/rollout/recomputed_cut_fraction"] == 0.0
        assert row["offpolicy/total/logp_diff_max"] < 0.2


def test_transformers_generate_reports_by_itself(tmp_path: Path) -> None:
    """Top-p beside min-p: the order of transformers is not that of the trainer's rule."""
    sampling = {"max_tokens": LENGTH, "top_p": 0.7, "min_p": 0.1}
    watch, ours = fit(
        tmp_path, "transformers", options={"correction": "measure", "sampling": sampling, "model": tiny_model()}
    )
    assert watch.logs[0]["offpolicy/rollout/recomputed_cut_fraction"] == 0.0
    assert 1 < watch.logs[0]["offpolicy/rollout/kept_ids_mean"] < 40
    part = ours.generation._buffer.micro_batches[0]
    here = part["completion_mask"].bool()
    with torch.no_grad():
        ours.policy.eval()
        found = ours.score(part)
        plain = ours.score({name: value for name, value in part.items() if name != KEY})
    assert not found.outside[here].any()
    assert float((found.logps - plain.logps)[here].abs().max()) > 0.01
