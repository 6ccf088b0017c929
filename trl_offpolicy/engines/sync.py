"""A sync sends the weights, proves that they arrived, and reports both, in the same way for every engine and trainer.

The proof is a fixed probe of a few tokens that trainer and engine score after every sync. A :class:`SyncWatch` looks at
the weights as they pass, and tells how much of the update the engine's precision can hold.
"""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median
from typing import NamedTuple, Protocol

import torch

from trl_offpolicy.engines.engine import EngineError, SyncError, SyncReport
from trl_offpolicy.engines.sync_trend import Drift, SyncTrend
from trl_offpolicy.engines.sync_watch import UNKNOWN, Precision, SyncWatch, holds_all, is_coarser, torch_dtype
from trl_offpolicy.functional.collective import gather_objects, is_distributed

logger = logging.getLogger(__name__)

SYNC_METRICS = ("sync_agreement", "sync_seconds", "sync_bytes", "sync_changed_fraction", "sync_visible_fraction")
"""``rollout/*`` keys that a trainer logs at every sync: :meth:`~trl_offpolicy.engines.engine.SyncReport.metrics`."""
PROBE_ROWS, PROBE_TOKENS = 4, 48
OTHER_BASE = 0.1
"""Mean absolute difference of log-probs (nats) on the probe above which 16-bit arithmetic is no explanation."""

Ids = Sequence[Sequence[int]]
Scores = Sequence[Sequence[float]]


class Gate(Protocol):
    """Judges the weights that were just proved; :class:`~trl_offpolicy.control.acceptance.UpdateGate`."""

    def accepts(self, version: int, agreement: float) -> bool:
        """Whether they stay."""

    def restore(self) -> None:
        """Give the trainer the weights that were accepted last."""


class Proof(NamedTuple):
    """What a proof found: ``rollout/sync_agreement``, and a difference that has grown over many syncs; None = none."""

    agreement: float
    drift: Drift | None


class WeightSync:
    """Syncs the weights of one trainer to one engine, as often as needed.

    Args:
        probe: token ids that both sides score, from :func:`probe_of`; None = nothing is proven.
        score: the trainer's log-probs (nats, temperature 1) of tokens 1, 2, ... of each sequence. Called by all ranks.
        without_adapter: context in which the trainer's model has no adapter, to recognise an engine that lacks it;
            None = there is no adapter.
        autocast: type that ``score`` computes in; None = that of the trainer's weights.

    Whoever sends the weights lets them pass ``watch``; otherwise nothing is known of them but the proof.
    """

    def __init__(
        self,
        probe: Ids | None = None,
        score: Callable[[Ids], Scores] | None = None,
        *,
        without_adapter: Callable[[], AbstractContextManager[object]] | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        if (probe is None) is not (score is None):
            raise ValueError("probe and score must be given together, but got one of them.")
        self._probe, self._score, self._without_adapter = probe, score, without_adapter
        self._autocast = autocast
        self._check = SyncCheck()
        self.watch = SyncWatch()
        self._told = False  # that there is a drift
        self._told_base = False
        self.gate: Gate | None = None
        """What may take an update back after its proof; None = every update stays."""

    @property
    def proves(self) -> bool:
        """True if there is a probe, without which nothing is known of the agreement."""
        return self._probe is not None

    def __call__(
        self,
        version: int,
        *,
        send: Callable[[int], SyncReport],
        answer: Callable[[Ids], Scores | None],
        precision: Precision = UNKNOWN,
        confirm: Callable[[bool], bool] | None = None,
    ) -> SyncReport:
        """Send the weights of ``version`` and prove them. Called by all ranks.

        A sync that left out what the engine has, and whose proof fails, is repeated with all weights. If the gate
        rejects them, the trainer gets those of the last accepted update back. These are sent and proved.

        A drift (:class:`~trl_offpolicy.engines.sync_trend.SyncTrend`) after a sync that left something out is such a
        failure, too. One that stays with all weights is an error if it is a lag and the engine's precision holds every
        change of the trainer's, so that precision cannot be its cause. Otherwise it is a warning, once a run.

        Args:
            version: version of the trainer's present weights.
            send: an engine's ``sync_weights``.
            answer: the engine's ``score``; None on a rank that does not talk to the engine.
            precision: in which the engine holds its weights.
            confirm: an engine's ``confirm``, which is told of each proof whether it passed; None = it sends everything.

        Raises:
            EngineError: on every rank, if the engine of any rank did not take the weights.
            SyncError: on every rank, if the engine of any rank does not answer with the weights that it got.
        """
        confirm = confirm or _sends_everything
        report = self._send(version, send, answer, precision, confirm)
        if self.gate is None or report.agreement is None or self.gate.accepts(version, report.agreement):
            return report
        self.gate.restore()
        return self._send(version, send, answer, precision, confirm)

    def _send(
        self,
        version: int,
        send: Callable[[int], SyncReport],
        answer: Callable[[Ids], Scores | None],
        precision: Precision,
        confirm: Callable[[bool], bool],
    ) -> SyncReport:
        """One sync and its proof."""
        self.watch.begin(precision)
        with raised_on_all_ranks():
            report = send(version)
        passed = asdict(self.watch.end())
        if self._probe is None:
            return replace(report, **passed)
        self._check.coarse_trainer = is_coarser(self._autocast or torch_dtype(passed["trainer_dtype"]), precision.dtype)
        try:
            proof = self._proved(version, self._probe, answer)
            if proof is not None and proof.drift is not None and any(gather_objects(not report.whole)):
                raise SyncError(f"{proof.drift} Something of what was left out may have changed.")
        except SyncError as error:  # the same one on all ranks
            if not any(gather_objects(confirm(False))):
                raise
            logger.warning("%s Only changed weights were sent; from now on all are.", error)
            with raised_on_all_ranks():
                report = send(version)
            proof = self._proved(version, self._probe, answer)
        if proof is not None and report.kind == "adapter" and precision.dtype is not None:
            self._compare_base(proof.agreement)
        if proof is not None and proof.drift is not None:
            certain = holds_all(precision, passed["trainer_dtype"], merged=self._without_adapter is not None)
            self._tell(version, proof.drift, certain=any(gather_objects(certain)))
        confirm(True)
        return replace(report, **passed, agreement=None if proof is None else proof.agreement)

    def _compare_base(self, agreement: float) -> None:
        """Warn once if an adapter that was sent alone may have come upon other base weights than the trainer's."""
        distance = -math.log(max(agreement, 1e-30))
        if distance <= OTHER_BASE or self._told_base:
            return
        self._told_base = True
        logger.warning(
            "Only the adapter was sent, and with it the engine's log-probs differ from the trainer's by %.2g nats a "
            "token on the probe, which the arithmetic of an unquantised engine does not explain. Its base weights may "
            "be other ones: those of the folder or Hub revision that it loaded, without an adapter that was merged "
            "into the trainer's model since. Save the merged model, and name that folder for both.",
            distance,
        )

    def _tell(self, version: int, drift: Drift, *, certain: bool) -> None:
        """Raise or warn of a drift that stays when all weights are sent."""
        found = f"After the sync of version {version}: {drift}"
        if certain and drift.lag is not None:
            raise SyncError(f"{found} {_NO_ROUNDING} {_NEXT}")
        if not self._told:
            logger.warning("%s %s %s", found, _UNCERTAIN, _NEXT)
        self._told = True

    def _proved(self, version: int, probe: Ids, answer: Callable[[Ids], Scores | None]) -> Proof | None:
        """The mean agreement over the ranks' engines and the drift of any, or the error of any of them on all.

        None = there is no engine.
        """
        with raised_on_all_ranks():
            proof = self._prove(version, probe, answer)
        plain = proof is not None and proof.drift is None  # nearly always: a number is all that is exchanged then
        found = gather_objects(proof.agreement if proof is not None and plain else proof)
        known = [one if isinstance(one, Proof) else Proof(one, None) for one in found if one is not None]
        drift = next((one.drift for one in known if one.drift is not None), None)
        return Proof(fmean(one.agreement for one in known), drift) if known else None

    def _prove(self, version: int, probe: Ids, answer: Callable[[Ids], Scores | None]) -> Proof | None:
        """What this rank's engine answers; None on a rank without an engine."""
        assert self._score is not None
        # Scoring a sharded model is collective: every rank does it, also one that does not talk to the engine.
        trainer, others = self._score(probe), {}
        if self._without_adapter is not None:
            with self._without_adapter():
                others["the base model without the adapter"] = self._score(probe)
        engine = answer(probe)
        if engine is None:
            return None
        agreement = self._check.observe(version, engine=engine, trainer=trainer, others=others)
        return Proof(agreement, self._check.drift)


_NO_ROUNDING = (
    "The engine's precision holds every change of the trainer's, so a part of the weights does not arrive: names that "
    "the engine skips, or weights that it was given only once."
)
_UNCERTAIN = (
    "Whether weights do not arrive or the engine's precision hides a part of the updates (sync_visible_fraction, or an "
    "adapter that is merged in 16 bits) cannot be told from this; in both cases the run trains on."
)
_NEXT = (
    "To see which weights differ, save a checkpoint and compare them one by one with a server's: trl-offpolicy probe "
    "--model CHECKPOINT --engine URL. With an engine in this process, resume from the checkpoint: if weights do not "
    "arrive, the agreement of its first sync is lower than that of this run's."
)


def _sends_everything(proven: bool) -> bool:
    return False


@contextmanager
def raised_on_all_ranks(kind: type[Exception] = EngineError) -> Iterator[None]:
    """Raises an error of this kind of any rank on every rank, so that none waits forever. It is also a barrier."""
    error: Exception | None = None
    try:
        yield
    except kind as raised:
        error = raised
    sent = error if error is None or not is_distributed() else _portable(error)
    for one in gather_objects(sent):
        if one is not None:
            raise error or one


def _portable(error: Exception) -> Exception:
    """The error, or its text in an :class:`EngineError` if it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return EngineError(f"{type(error).__name__}: {error}")
    return error


@dataclass(frozen=True, kw_only=True)
class SyncLimits:
    """When a distance (mean absolute difference of log-probs over the probe's tokens, nats) is a fault.

    Args:
        factor: a distance above ``factor`` times the noise floor, the median of the accepted distances, is a fault. It
            finds a jump. What adds up slowly raises the floor as well, and is found by ``SyncCheck.drift``.
        least: a distance below this alone is never a fault.
        share: nor is a distance below this share of what the trainer moved since the last sync. The error of rounding
            to int8, for example, grows with the step; weights that arrived in part are off by a good part of the step.
        first: limit of the first sync, which has no floor yet; another model is several nats away.
        unmoved: the engine kept its weights if it moved less than this share of what the trainer moved.
        history: versions of the trainer's scores that are kept to name a stale one.
    """

    factor: float = 4.0
    least: float = 1e-4
    share: float = 0.2
    first: float = 1.0
    unmoved: float = 0.1
    history: int = 8


@dataclass
class SyncCheck:
    """Compares both sides after every sync and keeps what it needs to name the cause of a difference.

    Example:
        >>> check = SyncCheck()
        >>> round(check.observe(0, engine=[[-1.0, -2.0]], trainer=[[-1.0, -2.1]]), 4)
        0.9512
    """

    limits: SyncLimits = field(default_factory=SyncLimits)
    coarse_trainer: bool = False
    """The trainer computes in a coarser precision than the engine: rounding moves its log-probs after the smallest
    step, and so a move that is not far above the floor does not show that the engine should have moved, too."""
    drift: Drift | None = field(default=None, init=False)
    """A difference that has grown over the syncs so far, where each sync alone was accepted; None = there is none."""
    _trend: SyncTrend = field(default_factory=SyncTrend)
    _accepted: list[float] = field(default_factory=list)
    _trainer: dict[int, list[float]] = field(default_factory=dict)
    _engine: tuple[int, list[float]] | None = None

    def observe(
        self, version: int, *, engine: Scores, trainer: Scores, others: Mapping[str, Scores] | None = None
    ) -> float:
        """``rollout/sync_agreement`` = exp(-distance), in (0, 1].

        Args:
            version: version of the weights that were synced.
            engine: the engine's log-probs of the probe's tokens.
            trainer: the trainer's log-probs of them.
            others: the trainer's log-probs with other weights, by name (e.g. "the base model without adapter").

        Raises:
            SyncError: the engine answers with other weights; the message says with which, if it can be told.
        """
        answer, wanted = _flat(engine), _flat(trainer)
        distance = _distance(answer, wanted)
        cause = self._cause(version, answer, wanted, distance, others or {})
        if cause is not None:
            raise SyncError(
                f"After the sync of version {version} the engine's log-probs differ from the trainer's by "
                f"{distance:.2g} nats a token on the probe ({self._usual}). {cause}"
            )
        self._accepted.append(distance)
        self._trainer.pop(version, None)
        self._trainer[version] = wanted
        for old in list(self._trainer)[: -self.limits.history]:  # by age: a second run counts from 0 again
            del self._trainer[old]
        self._engine = (version, answer)
        self.drift = self._trend.observe(engine=answer, trainer=wanted)
        return math.exp(-distance)

    @property
    def floor(self) -> float | None:
        """Median of the accepted distances, nats; None before the first sync."""
        return median(self._accepted) if self._accepted else None

    @property
    def _usual(self) -> str:
        return "no sync before" if self.floor is None else f"usual in this run: {self.floor:.2g}"

    def _cause(
        self, version: int, answer: list[float], wanted: list[float], distance: float, others: Mapping[str, Scores]
    ) -> str | None:
        if not math.isfinite(distance):
            return "The log-probs are not finite: broken weights, or a model that diverged."
        # First, because after a small step stale weights are within the limit: only their not moving gives them away.
        stale = self._stale(version, answer, wanted, distance)
        if stale is not None:
            return f"Stale weights: {stale} The sync did not take effect."
        if distance <= self._limit(wanted):
            return None
        for name, scores in others.items():
            # Clearly nearer than to the weights that were sent; a half leaves room for the engine's own noise.
            if _distance(answer, _flat(scores)) < distance / 2:
                return f"It answers as {name}: the adapter was not applied, or is another one."
        if self.floor is None:
            return "Another model (wrong name or folder given to the engine), or a tokenizer that differs."
        return "The weights arrived in part or are another run's: a partial file, a wrong adapter, or two trainers."

    def _limit(self, wanted: list[float]) -> float:
        """The largest distance that is not a fault, nats."""
        if self.floor is None or self._engine is None:
            return self.limits.first
        moved = _distance(wanted, self._trainer[self._engine[0]])
        return max(self.limits.factor * self.floor, self.limits.least, self.limits.share * moved)

    def _stale(self, version: int, answer: list[float], wanted: list[float], distance: float) -> str | None:
        """The older version with which the engine answers, if it can be told from the noise."""
        if self._engine is None or self._engine[0] == version:
            return None
        before, old_answer = self._engine
        moved, floor = _distance(wanted, self._trainer[before]), self.floor or 0.0
        least = max(self.limits.least, self.limits.factor * floor if self.coarse_trainer else 0.0)
        if moved > least and _distance(answer, old_answer) < self.limits.unmoved * moved:
            return f"its answers did not move, the trainer's moved by {moved:.2g} nats since version {before}."
        # It moved, but to weights that the trainer had before the last sync.
        nearest = min(self._trainer, key=lambda old: _distance(answer, self._trainer[old]))
        gap = _distance(answer, self._trainer[nearest])
        if distance > max(self.limits.factor * floor, self.limits.least) and gap < distance / 2:
            return f"it answers with version {nearest}."
        return None


def _flat(scores: Scores) -> list[float]:
    return [float(value) for row in scores for value in row]


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Mean absolute difference, nats."""
    return fmean(abs(x - y) for x, y in zip(a, b, strict=True))


def probe_of(prompt_ids: Ids) -> list[list[int]]:
    """The first few distinct prompts, cut to a few tokens: a probe of natural text that costs almost nothing.

    Raises:
        SyncError: no prompt has two tokens.
    """
    distinct = {tuple(ids[:PROBE_TOKENS]): None for ids in prompt_ids if len(ids) > 1}
    if not distinct:
        raise SyncError("The sync check needs a prompt of at least two tokens, but got none.")
    return [list(ids) for ids in list(distinct)[:PROBE_ROWS]]
