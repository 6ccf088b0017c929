"""A replay buffer in Lightning: drawn groups are added after the rows of each fresh generation batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lightning_module.engines import engine_type, reports_logps_of
from lightning_module.host import Host
from lightning_module.streams import BatchPlan, MicroStep
from trl_offpolicy.engines.routing.options import RoutingReplay
from trl_offpolicy.rollouts.replay.buffer import ReplayBuffer
from trl_offpolicy.rollouts.replay.mixing import check_sizes, mixed, refuse, refused_objectives, warn_of_other_sizes
from trl_offpolicy.rollouts.replay.settings import ReplaySettings

_OWNER, _FOLDER = "replay", "replay"


class ModuleReplay:
    """The buffer of a module and its draws. The current policy scores replayed rows in the loss step.

    Args:
        module: the module whose generation batches it completes.
        settings: its parsed argument ``replay``.
    """

    def __init__(self, module: Host, settings: ReplaySettings) -> None:
        self._module, self._settings = module, settings
        self._rng = np.random.default_rng(settings.seed)
        self.buffer: ReplayBuffer | None = settings.buffer
        self._closed: Path | None = None
        self._looked = False  # for groups of another size, once a run

    def start(self) -> None:
        """Begin a run: open the buffer, and seed the draws.

        Raises:
            NotImplementedError: there are several processes.
            BlockingIOError: another process has the buffer open.
        """
        trainer = self._module.trainer
        refuse(_OWNER, {"several processes": trainer.world_size > 1})
        self._rng, self._looked = np.random.default_rng(self._settings.seed), False
        if self.buffer is None:
            folder = own_folder(Path(trainer.default_root_dir), resumed=trainer.ckpt_path is not None)
            self.buffer = self._settings.open(folder)

    def close(self) -> None:
        """Close a buffer that was opened here."""
        if self.buffer is not None and self.buffer is not self._settings.buffer:
            self._closed = self.buffer.folder  # a checkpoint after the run reads it there
            self.buffer.close()
            self.buffer = None

    def check(self, plan: BatchPlan) -> None:
        """Raise unless the sizes of a generation batch go with replay.

        Raises:
            ValueError: the replayed rows cannot be split, a generation batch serves several optimizer steps, or the
                buffer is too small.
        """
        settings, given = self._settings, self._settings.buffer
        bound = "replay.max_rows" if given is None else "replay.buffer.max_rows"
        check_sizes(
            settings.groups,
            rows=plan.completions,
            max_rows=settings.max_rows if given is None else given.max_rows,
            generations=plan.num_generations,
            steps_per_generation=plan.steps_per_generation,
            num_iterations=plan.num_iterations,
            accumulation=self._module.trainer.accumulate_grad_batches,
            names=("replay.groups", "accumulate_grad_batches", bound),
        )

    def mixed(
        self,
        rows: dict[str, Any],
        step: MicroStep,
        *,
        pad: int,
        score_reference: Callable[[dict[str, Any]], Tensor],
    ) -> dict[str, Any]:
        """A generation batch followed by drawn groups; its own groups are then stored.

        Args:
            rows: the batch.
            step: the micro-step that it is made for.
            pad: id that pads shorter rows.
            score_reference: as in :func:`~trl_offpolicy.rollouts.replay.mixing.mixed`.
        """
        assert self.buffer is not None
        if not self._looked:
            warn_of_other_sizes(self.buffer, step.plan.num_generations)
            self._looked = True
        return mixed(
            rows,
            self.buffer,
            self._settings.groups,
            version=self._module.trainer.global_step,
            rng=self._rng,
            max_lag=self._settings.max_lag,
            generations=step.plan.num_generations,
            pad_token_id=pad,
            score_reference=score_reference,
        )

    def state_dict(self) -> dict[str, Any]:
        """The state of the draws and, unless ``in_checkpoint`` is false, the files of the buffer; None = not known."""
        files: dict[str, Tensor] | None = None
        if self._settings.in_checkpoint and self.buffer is not None:
            files = self.buffer.state_dict()
        elif self._settings.in_checkpoint and self._closed is not None:
            with self._settings.open(self._closed) as buffer:
                files = buffer.state_dict()
        return {"random": self._rng.bit_generator.state, "buffer": files}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        if not state:  # a checkpoint of a run without replay
            return
        assert self.buffer is not None
        self._rng.bit_generator.state = state["random"]
        if self._settings.in_checkpoint and state["buffer"] is not None:  # it may have been empty
            self.buffer.load_state_dict(state["buffer"])


def own_folder(root: Path, *, resumed: bool) -> Path:
    """The buffer's folder in that of the trainer: ``replay``, or ``replay-2``, ... if earlier runs have left theirs.

    Versions begin with 0 in each run, so groups of another one would have a wrong age.

    Args:
        root: the trainer's folder.
        resumed: whether the run goes on from a checkpoint: then it is the last one.
    """
    taken = 0
    while any(_numbered(root, taken + 1).glob("part-*.parquet")):
        taken += 1
    return _numbered(root, max(taken, 1) if resumed else taken + 1)


def _numbered(root: Path, number: int) -> Path:
    return root / (_FOLDER if number == 1 else f"{_FOLDER}-{number}")


def replayed(module: Host) -> ModuleReplay | None:
    """What replays for a module whose settings are known; None = every row is fresh.

    Raises:
        ValueError: a field of ``replay`` is not valid.
        NotImplementedError: replay does not work with another setting; the message names it.
    """
    given = module.settings
    settings = ReplaySettings.parse(given["replay"])
    if settings is None:
        return None
    refused = {
        "async_rollouts": given["async_rollouts"] is not None,
        "tools": bool(given["tools"]),
        "environments": given["environment_factory"] is not None,
        "a rollout function": given["rollout"] is not None,
        "routing_replay": RoutingReplay.parse(given["routing_replay"]).mode != "none",
        "engine.return_routing": isinstance(given["engine"], Mapping) and bool(given["engine"].get("return_routing")),
        **refused_objectives(module.stages, token_rewards=given["token_rewards"]),
        "an engine without log-probs": engine_type(given["engine"]) == "transformers"
        and not reports_logps_of(given["engine"]),
    }
    refuse(_OWNER, refused)
    return ModuleReplay(module, settings)
