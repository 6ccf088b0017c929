"""Programs that do not learn by a policy gradient from rollouts: their settings have other meanings."""

from __future__ import annotations

import re

from trl_offpolicy.migrate.reading import Settings

_WITHOUT_ROLLOUTS = frozenset(
    [*("sft", "dpo", "kto", "orpo", "cpo", "simpo", "rm", "prm", "pretrain", "cpt"),
     *("serve", "generation", "main_eval")]
)  # fmt: skip
"""Parts of a program's name that say what it does instead."""
_WITH_ROLLOUTS = frozenset(["rl", "rlvr", "rlhf", "grpo", "ppo", "rloo", "gspo", "dapo", "cispo", "reinforce"])
_TRL_COMMANDS = frozenset({"grpo", "rloo"})


def other_training(settings: Settings) -> str:
    """What the file does instead of learning from rollouts, in words; empty if nothing says so.

    DPO's beta is no coefficient of a KL term, and a rate for fine-tuning is none for RL, though the names are equal.

    Example:
        >>> other_training(Settings({}, entry="-m verl.trainer.fsdp_sft_trainer"))
        "starts verl.trainer.fsdp_sft_trainer, which is no policy gradient: its settings mean something else ('sft')"
    """
    method = settings.values.get("rlhf_type")
    if isinstance(method, str) and method not in ("grpo", "???"):
        return f"has rlhf_type {method!r}: its settings mean something else"
    if "stage" in settings.values and "finetuning_type" in settings.values:
        return f"is LLaMA-Factory's, of stage {settings.values['stage']!r}: its settings mean something else"
    words = settings.entry.removeprefix("-m ").removeprefix("--module ").split()
    if not words:
        return ""
    named = set(re.split(r"[^a-z]+", re.sub(r"\.py$", "", words[-1].lower()).rpartition("/")[2].rpartition(".")[2]))
    last = re.sub(r"\.py$", "", words[-1]).rpartition("/")[2].rpartition(".")[2]
    found = sorted((named | {last}) & _WITHOUT_ROLLOUTS)
    if words[0] == "trl" and len(words) > 1 and words[1] not in _TRL_COMMANDS:
        found = [words[1]]
    if not found or named & _WITH_ROLLOUTS:
        return ""
    return f"starts {' '.join(words)}, which is no policy gradient: its settings mean something else ({found[0]!r})"
