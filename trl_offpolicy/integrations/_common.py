"""What the adapters share: reading the method, refusing what a hook cannot carry, and the record of the run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim.optimizer import register_optimizer_step_post_hook

from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.objective.proximal import AveragedProximal
from trl_offpolicy.presets.frameworks.options import tell
from trl_offpolicy.presets.parsing import parse_correction, parse_objective, parse_preset
from trl_offpolicy.presets.preset import Preset
from trl_offpolicy.run_folder.writer import RunFolderWriter
from trl_offpolicy.stats import PREFIX, Stats
from trl_offpolicy.types import WIDE_SCOPES

RUN_DIR = "run_dir"
"""Key beside those of ``offpolicy``: the folder for ``run.json`` and ``metrics.jsonl``; without it none is written."""

_RATIO_LOGGED = (
    "kl_k1", "kl_k3", "chi2_token", "chi2_sequence", "ess_sequence", "ppl_ratio", "log_ppl_diff", "log_ppl_abs_diff",
    "logp_diff_mean", "logp_diff_max", "prob_diff_mean",
)  # fmt: skip
LOGGED = (
    *(f"{PREFIX}{group}/{name}" for group in ("mismatch", "staleness", "total") for name in _RATIO_LOGGED),
    *(f"{PREFIX}{name}" for name in ("weight/mean", "weight/max", "weight/truncated_fraction")),
    *(f"{PREFIX}weight_applied/{name}" for name in ("mean", "std", "ess_token")),
    *(f"{PREFIX}keep/dropped_{name}_fraction" for name in ("token", "sequence")),
    *(f"{PREFIX}loss/{name}" for name in ("clip_low_fraction", "clip_high_fraction", "clip_region_fraction")),
)
"""The diagnostics that also go into the framework's own log. The run folder has all of them."""

OWN_FIELDS = {
    "kl": "its KL term",
    "entropy_coef": "its entropy bonus",
    "aggregation": "its reduction of the loss",
    "max_length": "its reduction of the loss",
    "denominator": "its reduction of the loss",
}
"""Fields of an objective that the framework decides, and what they are there."""


@dataclass(frozen=True)
class Method:
    """What a user's ``offpolicy`` mapping describes.

    Args:
        preset: the preset, whose ``objective`` is complete.
        run_dir: folder of the run, or None.
    """

    preset: Preset
    run_dir: Path | None

    @property
    def objective(self) -> Objective:
        """The objective, with its correction."""
        return self.preset.objective

    @property
    def correction(self) -> Correction:
        """The correction; without one the mismatch is still measured."""
        return self.objective.correction or Correction()


_METHODS: dict[str, Method] = {}


def read_method(
    spec: Any, *, where: str, framework: str, base: Objective | None = None, row_by_row: bool = False
) -> Method:
    """The method that a framework's configuration names, read once.

    Args:
        spec: a preset's name, a mapping with the keys of ``offpolicy`` and ``run_dir``, or an object of this kit.
        where: the option's name in error messages.
        framework: the framework's name in error messages.
        base: the framework's own loss, for a method that names none.
        row_by_row: the framework hands over one sequence at a time, not a micro-batch.

    Raises:
        ValueError: an unknown name, key or option, or a quantity that the framework sets.
        NotImplementedError: a part that sees more than the framework hands to its hook.
    """
    spec = _plain(spec)
    key = f"{where} {spec!r} {base!r}"
    if key not in _METHODS:
        _METHODS[key] = _read(spec, where, framework, base or Objective(), row_by_row=row_by_row)
    return _METHODS[key]


def _read(spec: Any, where: str, framework: str, base: Objective, *, row_by_row: bool) -> Method:
    run_dir = None
    if isinstance(spec, dict):
        spec = dict(spec)
        run_dir = spec.pop(RUN_DIR, None)
    if not spec:
        raise ValueError(f"{where} must name a method, e.g. {{preset: paper/tis}}, but got {spec!r}.")
    preset, said = parse_preset(spec, where=where)
    if preset.auto is not None:
        raise NotImplementedError(f"{where}: auto revises the correction while this kit's own trainers train.")
    if preset.trainer:
        raise NotImplementedError(
            f"{where} must name a method that is a loss alone, but {preset.name} also sets {', '.join(preset.trainer)} "
            f"of this kit's trainers. Name the parts of its loss alone, as correction and objective."
        )
    if preset.advantages is not None or said.get("advantages") is not None:
        raise ValueError(f"{where}.advantages must be left out: {framework} makes the advantages.")
    own = said.get("objective") or {}
    for name, what in OWN_FIELDS.items():
        if name in own:
            raise ValueError(f"{where}.objective.{name} must be left out: {framework} sets {what}.")
    changes = {name: value for name, value in preset.objective_changes.items() if name not in OWN_FIELDS}
    if "aggregation" in preset.objective_changes and not preset.name.lower().startswith(framework.lower()):
        tell(
            f"{where}: {preset.name} reduces its loss as {preset.objective.aggregation}. {framework} reduces it by its "
            "own setting: set it to the same."
        )
    if changed := [name for name in ("kl", "entropy_coef") if name in preset.objective_changes]:
        raise ValueError(f"{where} must not set {changed[0]}: {framework} sets {OWN_FIELDS[changed[0]]}.")
    objective = parse_objective(own, where=f"{where}.objective", base=replace(base, **changes))
    correction = parse_correction(said.get("correction") or {}, where=f"{where}.correction", base=preset.correction)
    objective = replace(objective, correction=correction)
    _refuse_wide(preset, objective, where, framework, row_by_row=row_by_row)
    return Method(replace(preset, objective=objective), None if run_dir is None else Path(str(run_dir)))


def _refuse_wide(preset: Preset, objective: Objective, where: str, framework: str, *, row_by_row: bool) -> None:
    """Raise for what needs more rows than the hook sees, or what travels with those of a whole generation batch."""
    why = f"{framework} hands its hook one {'sequence' if row_by_row else 'micro-batch'} at a time"
    if row_by_row and objective.scope == "micro_batch":
        parts_of_it = "a budget, a normalisation over it, an ESS of it"
        raise NotImplementedError(f"{where} must have no part of scope micro_batch ({parts_of_it}): {why}.")
    if preset.objective.denominator == "kept" or objective.scope in WIDE_SCOPES:
        correction = objective.correction
        parts: list[Any] = [] if correction is None else [*correction.weights, *correction.keep]
        wide = [type(part).__name__ for part in parts if part.scope in WIDE_SCOPES]
        if correction is not None and correction.normalize != "none":
            wide.append(f"normalize={correction.normalize!r}")
        if preset.objective.denominator == "kept":
            wide.append("denominator='kept'")
        named = ", ".join(wide) or type(objective.policy_loss).__name__
        raise NotImplementedError(f"{where} must have no part of scope group or generation_batch ({named}): {why}.")
    if moving := [type(one).__name__ for one in objective.shaping if one.moves]:
        raise NotImplementedError(
            f"{where}.objective.shaping must have fixed coefficients (target null), but got {moving[0]}, which moves "
            f"by the mean of a whole optimizer step: {why}."
        )
    if isinstance(objective.proximal, AveragedProximal):
        raise NotImplementedError(f"{where}.objective.proximal must not be an average, which is kept with rows: {why}.")


def _plain(spec: Any) -> Any:
    """A framework's configuration node as dicts and lists; an object of this kit stays as it is."""
    if isinstance(spec, Mapping):
        return {str(key): _plain(value) for key, value in spec.items()}
    if isinstance(spec, Sequence) and not isinstance(spec, str | bytes):
        return [_plain(value) for value in spec]
    return spec


def measured_as_total(method: Method) -> Objective:
    """The method's objective where pi_old is not known apart from pi: only current/sampling is measured."""
    return replace(method.objective, correction=replace(method.correction, measure=("total",)))


def padded(rows: Iterable[Tensor], value: float = 0.0) -> Tensor:
    """One-dimensional tensors as the rows of one (B, T); T is at least 1.

    Example:
        >>> padded([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
        tensor([[1., 2.],
                [3., 0.]])
    """
    table = pad_sequence(list(rows), batch_first=True, padding_value=value)
    return table if table.shape[1] else torch.nn.functional.pad(table, (0, 1), value=value)


HUGE = 1e30
"""Stands for infinity in the framework's log: a divergence must not look like agreement."""


def numbers(stats: Stats) -> dict[str, Tensor]:
    """The diagnostics for the framework's own log; 0 for NaN, and -1e30 or 1e30 for what is infinite.

    None is left out by its value: SkyRL and prime-rl reduce key by key over the ranks, which must have the same keys.
    The run folder has each number as it is.
    """
    found = {name: stats[name].value for name in LOGGED if name in stats}
    return {name: torch.nan_to_num(value.float(), posinf=HUGE, neginf=-HUGE) for name, value in found.items()}


def logged(stats: Stats) -> dict[str, float]:
    """:func:`numbers` with one transfer to the host."""
    found = numbers(stats)
    if not found:
        return {}
    return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))


def over_ranks(stats: Stats, group: Any) -> Stats:
    """The diagnostics of all ranks of a process group, each of which calls this; None = this rank alone."""
    if group is None:
        return stats

    def gather(vector: Tensor) -> Tensor:
        parts = [torch.empty_like(vector) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(parts, vector.contiguous(), group=group)
        return torch.stack(parts)

    return stats.all_reduce(gather)


def same_on_tokens(old: Tensor, sampling: Tensor, mask: Tensor, group: Any) -> bool:
    """True if there are tokens, and both are equal on all of them: one answer for all ranks of a group.

    What is measured depends on it, and ranks with different diagnostics could not add them. A rank whose micro-batch
    has no tokens cannot tell.

    Args:
        old: log-probs (nats) of pi_old, (B, T).
        sampling: those of the sampler, (B, T).
        mask: not 0 on tokens, (B, T).
        group: a process group, each of whose ranks calls this; None = this rank alone.
    """
    tokens = mask != 0
    found = torch.stack([tokens.any(), ((old != sampling) & tokens).any()]).float()
    if group is not None:
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX, group=group)
    present, different = found.tolist()
    return bool(present) and not different


class Recorder:
    """Writes a row of ``metrics.jsonl`` after each optimizer step, from all the calls since the one before.

    It makes no collective: a hook that waited for other ranks could hang a run in which not all of them call it.

    Args:
        writer: the run folder.
    """

    def __init__(self, writer: RunFolderWriter) -> None:
        self._writer, self._pending, self._step = writer, Stats({}), 0
        register_optimizer_step_post_hook(self._after_step)

    def add(self, stats: Stats) -> None:
        """Add the diagnostics of a micro-batch."""
        self._pending = self._pending.merge(stats)

    def _after_step(self, optimizer: object, args: object, kwargs: object) -> None:
        """Write what was added; an optimizer of another model finds nothing."""
        if not self._pending.groups:
            return
        if self._step == 0:
            self._writer.begin(0, seed=None)
        self._step += 1
        self._writer.log(self._step, self._pending.measured().compute())
        self._pending = Stats({})


_RECORDERS: dict[Path, Recorder] = {}


def record(method: Method, stats: Stats, *, framework: str, rows_of: str = "one rank") -> None:
    """Add a micro-batch to the record of this process, if the method names a folder and this process is the first.

    Args:
        method: the method, with its folder.
        stats: the diagnostics.
        framework: for ``run.json``.
        rows_of: whose responses the rows hold, for ``run.json``.
    """
    if method.run_dir is None or not _is_first_process():
        return
    if method.run_dir not in _RECORDERS:
        info = {**method.preset.described(), "trainer": framework, "engine": framework, "rows_of": rows_of}
        _RECORDERS[method.run_dir] = Recorder(RunFolderWriter(method.run_dir, info))
    _RECORDERS[method.run_dir].add(stats)


def _is_first_process() -> bool:
    """True on rank 0; with Megatron on the first data, tensor and context parallel rank of the stage with the loss."""
    parallel = sys.modules.get("megatron.core.parallel_state")
    if parallel is not None and parallel.model_parallel_is_initialized():
        ranks = (
            parallel.get_data_parallel_rank(),
            parallel.get_tensor_model_parallel_rank(),
            parallel.get_context_parallel_rank(),
        )
        return not any(ranks)
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
