"""On several processes both trainers refuse replay, on each of them, before anything is sampled."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import two_ranks

pytestmark = pytest.mark.integration


def refused_by_trl(folder: Path) -> str:
    """What TRL's trainer says. It must come first: it sets the process group up by itself."""
    from tiny_models import score_last_word, tiny_model, tiny_prompts, tiny_tokenizer
    from trainer_runs import Engine

    from trl_offpolicy.rollouts.replay import ReplayBuffer
    from trl_offpolicy.trl.config import OffPolicyGRPOConfig
    from trl_offpolicy.trl.replay import ReplayGRPOTrainer

    args = OffPolicyGRPOConfig(
        str(folder / "trl"), use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=4,
        num_generations=4, max_completion_length=6, offpolicy="paper/tis", write_report=False,
    )  # fmt: skip
    with ReplayBuffer(folder / f"buffer-{args.process_index}", max_rows=1000) as buffer:
        return error_of(
            lambda: ReplayGRPOTrainer(
                tiny_model(), score_last_word, args, train_dataset=tiny_prompts(), processing_class=tiny_tokenizer(),
                rollout_func=Engine(), replay=buffer, replay_groups=1,
            )
        )  # fmt: skip


def refused_by_lightning(folder: Path) -> str:
    from lightning_runs import OwnMismatch, data, module, trainer

    engine = OwnMismatch()
    ours = module(engine, correction="paper/tis", replay={"groups": 1, "max_rows": 1000})
    owner = trainer(folder, devices=two_ranks.WORLD, strategy="ddp", max_steps=1)
    said = error_of(lambda: owner.fit(ours, data()))
    assert not engine.calls
    return said


def error_of(call: Any) -> str:
    try:
        call()
    except NotImplementedError as error:
        return str(error)
    return "no error"


def test_replay_on_two_processes_is_refused(tmp_path: Path) -> None:
    for printed in two_ranks.launch_script(__file__, tmp_path):
        assert "TRL: ReplayGRPOTrainer does not work with several processes." in printed
        assert "Lightning: replay does not work with several processes." in printed


if __name__ == "__main__":
    place = Path(sys.argv[1])
    print("TRL:", refused_by_trl(place), flush=True)
    print("Lightning:", refused_by_lightning(place), flush=True)
