"""The policies that replace pi_old on rows that older weights sampled: copies of the weights, or their average."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from trl_offpolicy.functional.collective import sum_ranks
from trl_offpolicy.functional.mixture import mixture_logps
from trl_offpolicy.objective.proximal import Proximal, RecomputedProximal
from trl_offpolicy.rollouts.ahead.local_weights import Release, Weights, copied, frozen_copy, is_sharded, loaded
from trl_offpolicy.rollouts.ahead.parts import padded_versions
from trl_offpolicy.rollouts.ahead.settings import AsyncSettings

OLD, PROXIMAL, SAMPLING = "old_per_token_logps", "proximal_per_token_logps", "sampling_per_token_logps"

Score = Callable[[Any], Tensor]
"""Returns (B, T) log-probs of a batch's completions, nats, under the model that it is given as that is; no gradient."""


class Place(Protocol):
    """Where the weights of a version are while they score."""

    def scoring(self, model: Any, version: int, weights: Weights) -> Any:
        """A context that gives a model with ``weights``, the copies of ``version``; ``model`` is what is trained."""

    def forget(self, version: int) -> None:
        """The weights of ``version`` have changed."""


class InTheModel:
    """The model that is trained scores: its weights are exchanged, and come back afterwards.

    Args:
        release: as :func:`~trl_offpolicy.rollouts.ahead.local_weights.loaded` takes it.
    """

    def __init__(self, release: Release = None) -> None:
        self._release = release

    @contextmanager
    def scoring(self, model: Any, version: int, weights: Weights) -> Iterator[Any]:
        """:class:`Place`."""
        with loaded(model, weights, release=self._release):
            yield model

    def forget(self, version: int) -> None:
        """:class:`Place`; nothing stays."""


class InItsOwnModel:
    """A second model scores, so what is trained is not touched (Guan et al. 2026, the dedicated model of old logits).

    It has trainable weights of its own on the device of the trained ones, for as long as it lives, and reads the others
    (those under an adapter) where they are. A version that it has already is not loaded again.
    """

    def __init__(self) -> None:
        self._model: Any = None
        self._version: int | None = None

    @contextmanager
    def scoring(self, model: Any, version: int, weights: Weights) -> Iterator[Any]:
        """:class:`Place`."""
        if self._model is None:  # now and not before: a trainer has finished with its model when it scores
            self._model = frozen_copy(model)
        if self._version != version:
            self._version = None  # until all of it is there
            own = dict(self._model.named_parameters())
            with torch.no_grad():
                for name, value in weights.items():
                    own[name].copy_(value)
            torch.clear_autocast_cache()  # within autocast it holds the weights of before, rounded
            self._version = version
        yield self._model

    def forget(self, version: int) -> None:
        """:class:`Place`."""
        if self._version == version:
            self._version = None


class Snapshots:
    """Copies of the trainable weights on the CPU, one for each version that may have sampled a token still to come.

    With sharded weights a rank keeps copies of its shards.

    The old log-probs are then exact, because a token is scored with the weights that sampled it (Guan et al. 2026,
    arXiv:2605.12070, "snapshot").

    Args:
        place: where they score; None = :class:`InTheModel`.
    """

    def __init__(self, place: Place | None = None) -> None:
        self._place = place or InTheModel()
        self._copies: dict[int, Weights] = {}

    @property
    def versions(self) -> list[int]:
        """The versions of which copies are kept, ascending."""
        return sorted(self._copies)

    def keep(self, model: Any, version: int, *, oldest: int) -> None:
        """Copy the weights of ``version``, and drop the copies of versions before ``oldest``."""
        self._copies = {known: copy for known, copy in self._copies.items() if known < version}  # of this run
        self._copies[version] = copied(model)
        self._place.forget(version)  # another run, or another update in the place of a rejected one
        for old in [known for known in self._copies if known < oldest]:
            del self._copies[old]

    def score(self, model: Any, score: Score, versions: Tensor, mask: Tensor) -> Tensor:
        """(B, T) log-probs, each token under the weights of its version; 0 outside ``mask``.

        Args:
            model: the model that is trained.
            score: called once for each version among the tokens, with the model that has its weights. With sharded
                weights, whose forwards all ranks run together, for each version among those of all ranks.
            versions: (B, T) integer.
            mask: (B, T) bool.

        Raises:
            ValueError: there is no copy of a version.
        """
        present = sorted(set(versions[mask].tolist()))
        self._check(present)
        if is_sharded(model):
            present, _ = self._of_all_ranks(versions, mask)
        if not present:
            return torch.zeros(versions.shape, device=versions.device)
        return self._own(self._score_all(model, score, present), present, versions, mask)

    def mixture(self, model: Any, score: Score, versions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T) log-probs of the mixture of all versions in the batch, and those of :meth:`score`. All ranks call it.

        A version's share is that of the trainable tokens, over all ranks. Each rank scores its rows under every version
        that is on any of them. Arguments and errors are those of :meth:`score`.
        """
        self._check(sorted(set(versions[mask].tolist())))
        present, counts = self._of_all_ranks(versions, mask)
        if not present:
            nothing = torch.zeros(versions.shape, device=versions.device)
            return nothing, nothing
        scored = self._score_all(model, score, present)
        return mixture_logps(scored, counts / counts.sum(), mask), self._own(scored, present, versions, mask)

    def _of_all_ranks(self, versions: Tensor, mask: Tensor) -> tuple[list[int], Tensor]:
        """The K versions that any rank's tokens have, and (K,) how many tokens over all ranks, float64. Collective."""
        known = self.versions
        here = [int(((versions == version) & mask).sum()) for version in known]
        counts = sum_ranks(torch.tensor(here, dtype=torch.float64, device=mask.device))
        return [version for version, count in zip(known, counts.tolist(), strict=True) if count > 0], counts[counts > 0]

    def _check(self, present: list[int]) -> None:
        if missing := [version for version in present if version not in self._copies]:
            raise ValueError(f"versions must be among {self.versions}, of which copies are kept, but got {missing[0]}.")

    def _score_all(self, model: Any, score: Score, present: list[int]) -> Tensor:
        """(K, B, T) log-probs under each version."""
        found = []
        for version in present:
            with self._place.scoring(model, version, self._copies[version]) as holder:
                found.append(score(holder))
        return torch.stack(found)

    @staticmethod
    def _own(scored: Tensor, present: list[int], versions: Tensor, mask: Tensor) -> Tensor:
        """(B, T) of (K, B, T): each token under its version; 0 outside ``mask``."""
        found = torch.zeros_like(scored[0])
        for logps, version in zip(scored, present, strict=True):
            found = torch.where((versions == version) & mask, logps, found)
        return found


NO_AVERAGE = "async_rollouts.old_logps 'ewma': the checkpoint has no average, which starts anew here."
"""The warning of both trainers at such a resume."""


class WeightAverage:
    """Moving average of the trainable weights on the CPU: PPO-EWMA's proximal policy.

    Args:
        decay: weight of the past per optimizer step.
        release: as :func:`~trl_offpolicy.rollouts.ahead.local_weights.loaded` takes it.

    Reference: Hilton et al. 2021, "Batch size-invariance for policy optimization" (arXiv:2110.00641). Deviation: the
    average is updated once per generation, with decay to the power of the optimizer steps since. It starts at the first
    weights that it sees, without their bias correction.
    """

    def __init__(self, decay: float, release: Release = None) -> None:
        self._decay, self._release = decay, release
        self._average: Weights = {}
        self._version = 0

    @torch.no_grad()
    def add(self, model: Any, version: int) -> None:
        """Add the weights after ``version`` optimizer steps to the average; an earlier version begins a new one."""
        if version < self._version:  # another run of the same trainer
            self._average = {}
        now = {name: value.float() for name, value in copied(model).items()}
        past = self._decay ** (version - self._version) if self._average else 0.0
        self._average = {
            name: value if past == 0.0 else past * self._average[name] + (1.0 - past) * value
            for name, value in now.items()
        }
        self._version = version

    def score(self, model: Any, score: Score) -> Tensor:
        """(B, T) log-probs under the averaged weights; ``score`` is called while the model has them."""
        with loaded(model, self._average, release=self._release):
            return score(model)

    def state_dict(self) -> dict[str, Any]:
        """The average (this rank's part of it, with sharded weights) and its version, for a checkpoint."""
        return {"version": self._version, "average": dict(self._average)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._version = state["version"]
        self._average = {name: value.cpu() for name, value in state["average"].items()}


class OldPolicy:
    """What takes the place of pi_old on rows that older weights sampled, as ``async_rollouts.old_logps`` says.

    Args:
        settings: the parsed field.
        release: as :func:`~trl_offpolicy.rollouts.ahead.local_weights.loaded` takes it.
    """

    def __init__(self, settings: AsyncSettings, release: Release = None) -> None:
        self._recomputes = settings.old_logps == "recompute_proximal"
        self._balances = settings.old_logps == "balance"
        place = InItsOwnModel() if settings.old_logps == "model" else InTheModel(release)
        self._snapshots = Snapshots(place) if settings.old_logps in ("snapshot", "model", "balance") else None
        self.average = WeightAverage(settings.ewma_decay, release) if settings.old_logps == "ewma" else None

    def keep(self, model: Any, version: int, *, oldest: int) -> None:
        """Keep a copy of the weights that were just sent to the engine, if ``old_logps`` needs one.

        Args:
            model: the model that has these weights.
            version: their version.
            oldest: the oldest version that may have sampled a token still to come.
        """
        if self._snapshots is not None:
            self._snapshots.keep(model, version, oldest=oldest)

    def reads_scores(self, proximal: Proximal) -> bool:
        """True if log-probs at the current weights are read, so that they are worth a forward."""
        return self._recomputes and isinstance(proximal, RecomputedProximal)

    def name_of_scores(self, proximal: Proximal) -> str | None:
        """The key for log-probs at the current weights of rows that older weights sampled; None = nothing reads them.

        For such rows they are the proximal policy and not the old one. For rows of the current weights they are both.
        If copies of the weights are kept, the old policy is known and the clip is around it.
        """
        if self._snapshots is not None:
            return None
        return PROXIMAL if isinstance(proximal, RecomputedProximal) else None

    def complete(
        self,
        rows: dict[str, Any],
        versions: Sequence[Sequence[int]],
        *,
        model: Any,
        proximal: Proximal,
        score: Score,
        mask: Tensor,
        current: int,
    ) -> None:
        """Add the version of each token to a generation batch, and give its log-probs their right names.

        The present weights enter the average here and not at a sync: a validation syncs too, but only the versions at
        which training takes a generation batch count.

        Args:
            rows: the batch; ``old_per_token_logps`` in it are those at the current weights.
            versions: the version of each token of each row.
            model: the model that is trained, with the current weights.
            proximal: of the objective.
            score: scores the batch; also called for weights that are not the current ones.
            mask: (B, T) bool, the trainable tokens.
            current: the present version, which rows without a token get.
        """
        ids = rows["completion_ids"]
        padded = padded_versions(versions, length=ids.shape[1], of_empty=current)
        rows["policy_versions"] = torch.tensor(padded, device=ids.device)
        today, name = rows.pop(OLD, None), self.name_of_scores(proximal)
        if self._snapshots is not None and self._balances:
            rows[OLD], own = self._snapshots.mixture(model, score, rows["policy_versions"], mask)
            if rows.get(SAMPLING) is not None:  # old/sampling stays the engine's own mismatch
                rows[SAMPLING] = rows[SAMPLING] + (rows[OLD] - own)
        elif self._snapshots is not None:
            rows[OLD] = self._snapshots.score(model, score, rows["policy_versions"], mask)
        elif self.average is not None:
            self.average.add(model, current)
            rows[PROXIMAL] = self.average.score(model, score)
        elif today is not None and name is not None:
            rows[name] = today
