"""The patch that we propose to TRL (docs/patches): a stock trainer with it and a correction has our trainer's loss."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trl
from tiny_models import FIRST_WORD, VOCABULARY, score_last_word, tiny_prompts

import trl_offpolicy as op
from trl_offpolicy.trl.config import OffPolicyGRPOConfig
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

PATCH = Path(op.__file__).parents[1] / "docs" / "patches" / "trl-1.16-correction.patch"
ROWS, PROMPT, LENGTH = 4, 3, 6
CORRECTION = op.Correction(
    weight=op.TruncateWeight(level="token", max_weight=1.2),
    keep=(op.RatioBand(level="sequence_mean", low=0.7, high=1.3),),
)


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """``GRPOTrainer`` of a patched copy of the installed TRL."""
    folder = tmp_path_factory.mktemp("patched")
    copy = folder / "trl" / "trainer" / "grpo_trainer.py"
    copy.parent.mkdir(parents=True)
    shutil.copy(Path(trl.__file__).parent / "trainer" / "grpo_trainer.py", copy)
    subprocess.run(["git", "apply", str(PATCH)], cwd=folder, check=True)
    name = "trl.trainer.grpo_trainer_patched"
    spec = importlib.util.spec_from_file_location(name, copy)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module.GRPOTrainer
    del sys.modules[name]


def hook(correction):
    """A correction of this kit as the patch calls it."""

    def call(*, mask, **fields):
        out = correction(op.PolicyBatch(completion_mask=mask, **fields))
        return out.weights, out.keep_mask

    return call


def inputs(*, aligned):
    """A micro-batch; ``aligned``: TRL scored no old log-probs, as they are those of the current policy."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(FIRST_WORD, len(VOCABULARY), (ROWS, PROMPT + LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < torch.tensor([6, 4, 2, 5])[:, None]).long()
    old = -4.8 + 0.3 * torch.randn(ROWS, LENGTH, generator=generator)
    offset = torch.tensor([0.1, -0.6, 0.0, -0.1])[:, None]
    given = {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": torch.ones(ROWS, PROMPT, dtype=torch.long),
        "completion_ids": ids[:, PROMPT:],
        "completion_mask": mask,
        "advantages": torch.tensor([0.5, -0.4, 0.3, -0.7]),
        "old_per_token_logps": old * mask,
        "sampling_per_token_logps": (old - offset - 0.2 * torch.randn(ROWS, LENGTH, generator=generator)) * mask,
        "ref_per_token_logps": (old + 0.3) * mask,
        "num_items_in_batch": 2 * mask.sum(),
    }
    if aligned:
        del given["old_per_token_logps"]
    return given


def loss_and_gradient(trainer, *, aligned):
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, inputs(aligned=aligned))
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])


@pytest.mark.parametrize(("loss_type", "aligned"), [("grpo", False), ("dapo", False), ("dapo", True)])
def test_a_stock_trainer_with_a_correction_has_the_loss_and_gradient_of_ours(
    patched, loss_type, aligned, fresh_model, tokenizer, tmp_path
):
    options = {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "gradient_checkpointing": False,
        "per_device_train_batch_size": ROWS,
        "num_generations": 2,
        "max_completion_length": 10,
        "disable_dropout": True,
        "loss_type": loss_type,
        "beta": 0.1,  # dropped tokens keep their KL term in both
    }
    data = {"train_dataset": tiny_prompts(), "processing_class": tokenizer, "rollout_func": lambda *_: {}}
    stock = trl.GRPOConfig(**options)
    ours = OffPolicyGRPOConfig(**options, offpolicy=CORRECTION, record_rollouts=False, write_report=False)
    answers = [
        loss_and_gradient(trainer, aligned=aligned)
        for trainer in (
            patched(fresh_model("llama"), score_last_word, stock, correction=hook(CORRECTION), **data),
            OffPolicyGRPOTrainer(fresh_model("llama"), score_last_word, ours, **data),
            patched(fresh_model("llama"), score_last_word, stock, **data),
        )
    ]
    (loss, gradient), (expected_loss, expected), (without, _) = answers
    assert loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-6)
    assert (gradient - expected).norm() <= 1e-4 * expected.norm()
    assert abs(loss - without) > 1e-3  # the correction does something


def test_a_correction_beside_trls_own_is_refused(patched, tmp_path):
    """Which is on by default under vLLM, before anything is loaded."""
    both = trl.GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", use_vllm=True)
    with pytest.raises(ValueError, match=r"vllm_importance_sampling_correction must be False .* but got True"):
        patched("no/model", score_last_word, both, correction=hook(CORRECTION), train_dataset=tiny_prompts())
