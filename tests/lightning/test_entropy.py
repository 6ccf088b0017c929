"""The entropy options of a module: set once, kept in checkpoints, and over two ranks those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning_runs import Watch, data, module, trainer

ADAPTIVE = {
    "use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 9.0, "entropy_coef_delta": 0.01,
    "top_entropy_quantile": 0.5,
}  # fmt: skip


def test_a_coefficient_that_is_set_twice_is_refused() -> None:
    for entropy in ({"entropy_coef": 0.1}, {"use_adaptive_entropy": True}):
        with pytest.raises(ValueError, match=r"objective\.entropy_coef and entropy set the same quantity; set one"):
            module(entropy=entropy, objective={"entropy_coef": 0.2})
    assert module(entropy={"entropy_coef": 0.1}).objective.entropy_coef == 0.1
    assert module(entropy={"top_entropy_quantile": 0.2}, objective={"entropy_coef": 0.2}).objective.entropy_coef == 0.2
    with pytest.raises(ValueError, match=r"^entropy\.entropy_targt must be one of"):
        module(entropy={"entropy_targt": 1})


@pytest.mark.integration
def test_a_resumed_run_goes_on_with_its_coefficient(tmp_path: Path) -> None:
    def fit(steps: int, resume: Path | None = None) -> tuple[list[dict[str, float]], Any]:
        pl.seed_everything(1, verbose=False)
        watch, ours = Watch(), module(entropy=ADAPTIVE)
        owner = trainer(tmp_path, callbacks=[watch], max_steps=steps)
        owner.fit(ours, data(), ckpt_path=resume, weights_only=True if resume else None)
        return watch.logs, owner

    whole, _ = fit(4)
    _, owner = fit(2)
    owner.save_checkpoint(tmp_path / "two.ckpt")
    rest, _ = fit(4, tmp_path / "two.ckpt")
    assert [row["entropy_coef"] for row in whole] == pytest.approx([0.11, 0.12, 0.13, 0.14])
    for name in ("loss", "entropy_coef", "policy_loss", "entropy"):
        assert [row[name] for row in rest] == pytest.approx([row[name] for row in whole[2:]], abs=1e-12), name
