"""Know which policy really sampled each token, correct for it, show it, and say what to do about it.

``import trl_offpolicy as op`` needs torch only, and imports it with the first name that is used: the command line
answers ``--help`` without. :mod:`trl_offpolicy.public` lists the names. The trainer is
``trl_offpolicy.trainer.OffPolicyGRPOTrainer``.
"""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_offpolicy.public import *  # noqa: F403
else:

    def _imported(module: str) -> Any:
        """The module, imported without garbage collection: what an import makes stays, and torch's many objects too."""
        collected = gc.isenabled()
        gc.disable()
        try:
            return import_module(module)
        finally:
            if collected:
                gc.enable()

    def __getattr__(name: str) -> Any:
        """A public name, imported now (PEP 562). Type checkers read the import above and see a misspelling."""
        if not name.startswith("__") or name == "__all__":
            public = _imported("trl_offpolicy.public")
            if name == "__all__":
                return [*public.__all__, "attach"]
            if hasattr(public, name):
                return getattr(public, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})


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
