"""Know which policy really sampled each token, correct for it, show it, and say what to do about it.

``import trl_offpolicy as op`` needs torch only. The trainer is ``trl_offpolicy.trainer.OffPolicyGRPOTrainer``.
"""

from typing import Any

from trl_offpolicy import presets
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.terms import (
    BandWeight,
    DivergenceBand,
    ESSWeight,
    GroupRejection,
    KeepTerm,
    OffPolicySequenceMask,
    OutlierVeto,
    PrefixBudget,
    PrefixMinWeight,
    PrefixWeight,
    ProbabilityDifferenceMask,
    RatioBand,
    RawWeight,
    SecondMomentBudget,
    ShapedWeight,
    StalenessBound,
    SuffixVeto,
    TermInputs,
    TruncateWeight,
    Violations,
    Weighed,
    Weight,
)
from trl_offpolicy.objective import advantages, losses, proximal
from trl_offpolicy.objective.kl import AdaptiveKL, FixedKL, KLController, KLPenalty
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.presets.preset import Preset
from trl_offpolicy.stats import Stat, Stats
from trl_offpolicy.types import CorrectionOutput, ObjectiveOutput, PolicyBatch, Reduction

__version__ = "0.1.0"


def attach(trainer: Any, *, control: Any = "warn", record_rollouts: bool = True, write_report: bool = True) -> Any:
    """Measure, record and diagnose a stock ``trl.GRPOTrainer`` or ``trl.RLOOTrainer`` with one line in a script.

    Its logs get the ``offpolicy/*`` metrics. Its output folder gets ``run.json``, ``metrics.jsonl``,
    ``rollouts.parquet`` and, at the end, ``report.html``. New findings are printed. Loss and gradients are untouched,
    and no forward is added: the current log-probs are those of TRL's loss. If its batch has no old ones (aligned steps
    without TRL's correction), the current policy is the old one. ``policy_versions`` are the steps at which TRL
    generated.

    TRL's own correction stays as it is: ``mismatch/*`` measures the raw ratios, and ``weight/*`` and
    ``weight_applied/*`` measure the factors of TRL's loss. ``attach`` corrects nothing; for that use
    ``trl_offpolicy.trainer.OffPolicyGRPOTrainer``. Without log-probs of an engine (``use_vllm`` off and no
    ``rollout_func``) there is no mismatch to measure, and a message says so.

    RLOO drops the engine's log-probs and logs no ratio; they are kept here. Its own loss is not described, so only
    the distances between the policies are measured.

    On a CPU, call ``trl_offpolicy.engines.environment.prepare_environment()`` before you build a trainer with vLLM in
    its process.

    Args:
        trainer: a ``trl.GRPOTrainer`` or ``trl.RLOOTrainer``, before ``train()``.
        control: ``warn`` prints findings. ``stop`` also ends the run, with a checkpoint, when a finding is critical. A
            mapping as in ``docs/control.md`` sets more. With None or ``off`` nothing is watched. ``act`` is refused.
        record_rollouts: write every rollout.
        write_report: print the summary and write the report at the end.

    Returns:
        An :class:`~trl_offpolicy.trl.attach.Observer`, whose ``detach()`` undoes it.

    Raises:
        TypeError: ``trainer`` is neither.
        ValueError: it is a trainer of this kit, it is attached already, or ``control`` would change the run.
    """
    from trl_offpolicy.trl.attach import Observer

    return Observer(trainer, control=control, record_rollouts=record_rollouts, write_report=write_report)


__all__ = [
    "AdaptiveKL",
    "BandWeight",
    "Correction",
    "CorrectionOutput",
    "DivergenceBand",
    "ESSWeight",
    "FixedKL",
    "GroupRejection",
    "KLController",
    "KLPenalty",
    "KeepTerm",
    "Objective",
    "ObjectiveOutput",
    "OffPolicySequenceMask",
    "OutlierVeto",
    "PolicyBatch",
    "PrefixBudget",
    "PrefixMinWeight",
    "PrefixWeight",
    "Preset",
    "ProbabilityDifferenceMask",
    "RatioBand",
    "RawWeight",
    "Reduction",
    "SecondMomentBudget",
    "ShapedWeight",
    "StalenessBound",
    "Stat",
    "Stats",
    "SuffixVeto",
    "TermInputs",
    "TruncateWeight",
    "Violations",
    "Weighed",
    "Weight",
    "advantages",
    "attach",
    "losses",
    "presets",
    "proximal",
]
