"""In place of a vLLM server behind the real trainer: samples random words, scored by a copy of the weights it was sent.

The log-probs that it returns are the trainer's own at the version that sampled, so that what the trainer says of old
weights can be checked to the last digit.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from tiny_models import FIRST_WORD, VOCABULARY

from trl_offpolicy.engines.engine import Rollouts, Sampling, SyncReport
from trl_offpolicy.engines.sync_watch import UNKNOWN
from trl_offpolicy.rollouts.ahead.flight import Flight

BEHIND_SERVER = {
    "use_vllm": True,
    "vllm_mode": "server",
    "vllm_server_base_url": "http://127.0.0.1:1",
    "engine": {"check_sync": False, "transfer": "folder"},
    "offpolicy": "paper/tis",
    "control": None,
}
"""Options of a TRL run whose server is replaced."""


class FakeServer:
    """The part of ``ServerEngine`` that ``TRLEngine`` and ``Flight`` use.

    Args:
        model: whose shape the weights have.
        free: prompts that are answered at once, or how many of ``submitted``; others wait for a cut after
            ``before_cut`` tokens. None = all.
        before_cut: tokens that a request has when it waits.
        until: what others wait for in place of a cut; they are then answered in full.
        length: of a response; the same for all, so that a run can be repeated.
    """

    takes_adapter, passes = False, 1
    can_cut = True
    findings: tuple[()] = ()
    precision = UNKNOWN
    no_mask: str | None = "it is none of vLLM's"
    drafts: None = None

    def __init__(
        self,
        model: Any,
        *,
        free: int | list[list[int]] | None = None,
        before_cut: int = 3,
        length: int = 6,
        until: threading.Event | None = None,
    ) -> None:
        self._model = deepcopy(model)
        self.version: int | None = None
        self.free, self.before_cut, self.length, self.until = free, before_cut, length, until
        self.asked: list[tuple[list[int], int]] = []
        """Prompt and version of every new request."""
        self.syncs: list[int] = []
        self.submitted: list[list[int]] = []
        """Prompts in the order in which they were handed to the threads (:func:`note_submissions`)."""
        self._cuts = threading.Condition()
        self._number = 0
        self._lock = threading.Lock()
        self._sampled = Counter[tuple[int, ...]]()  # words depend on nothing else, so no order of threads matters

    def interview(self) -> None:
        """It has no vLLM to ask."""

    def close(self) -> None:
        """It holds nothing."""

    # ------------------------------------------------------------------------------------------------------ weights

    def bind(self, source: Any) -> None:
        self._source = source

    def confirm(self, proven: bool) -> bool:
        """Every sync has sent everything."""
        return False

    def sync_weights(self, version: int) -> SyncReport:
        with self._lock:
            self._model.load_state_dict(dict(self._source.merged()))
            self.version = version
        self.syncs.append(version)
        return SyncReport(version=version, kind="folder", bytes=0, seconds=0.0)

    def score(self, ids: Any) -> list[list[float]]:
        raise AssertionError("no sync is proven in these runs")

    # ----------------------------------------------------------------------------------------------------- sampling

    def cut(self) -> None:
        with self._cuts:
            self._number += 1
            self._cuts.notify_all()

    def parts(self, prompt: list[int], options: dict[str, Any], n: int) -> list[tuple[list[int], list[float], str]]:
        wanted = min(int(options["max_tokens"]), self.length)
        with self._lock:
            is_new = n > 1
            if is_new:
                self.asked.append((prompt, -1 if self.version is None else self.version))
            free = self.submitted[: self.free] if isinstance(self.free, int) else self.free
            waits = is_new and free is not None and prompt not in free
        if waits and self.until is not None:
            assert self.until.wait(20), "what was waited for did not come"
        if not waits or self.until is not None:
            return [self._sample(prompt, wanted, "length") for _ in range(n)]
        with self._cuts:
            before = self._number
            assert self._cuts.wait_for(lambda: self._number > before, timeout=20), "nobody cut the request"
        return [self._sample(prompt, self.before_cut, "abort") for _ in range(n)]

    def generate(self, prompt_ids: Any, sampling: Sampling, *, n: int = 1) -> Rollouts:
        wanted = min(sampling.max_tokens, self.length)
        rows = [(list(ids), self._sample(list(ids), wanted, "length")) for ids in prompt_ids for _ in range(n)]
        return Rollouts(
            prompt_ids=[ids for ids, _ in rows],
            completion_ids=[row[0] for _, row in rows],
            sampling_per_token_logps=[row[1] for _, row in rows],
            policy_versions=[[self.version or 0] * len(row[0]) for _, row in rows],
            finish_reasons=["length"] * len(rows),
        )

    @torch.no_grad()
    def _sample(self, prompt: list[int], length: int, reason: str) -> tuple[list[int], list[float], str]:
        with self._lock:
            key = tuple(prompt)
            self._sampled[key] += 1
            chance = torch.Generator().manual_seed(hash((key, self._sampled[key])) % 2**31)
            words = torch.randint(FIRST_WORD, len(VOCABULARY), (length,), generator=chance).tolist()
            logits = self._model(input_ids=torch.tensor([prompt + words])).logits[0, len(prompt) - 1 : -1]
        return words, logits.log_softmax(-1).gather(-1, torch.tensor(words)[:, None])[:, 0].tolist(), reason


def server_class(model: Any, made: list[FakeServer], **options: Any) -> Callable[..., FakeServer]:
    """What takes the place of ``ServerEngine``; what it made is put into ``made``."""

    def make(*_: Any, **__: Any) -> FakeServer:
        made.append(FakeServer(model, **options))
        return made[-1]

    return make


def note_submissions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every :class:`FakeServer` know the prompts in the order in which the trainer asks for them."""
    submit = Flight.submit

    def submitting(self: Flight, prompt: Any, *args: Any) -> Any:
        self._server.submitted.append(prompt)  # type: ignore[attr-defined]
        return submit(self, prompt, *args)

    monkeypatch.setattr(Flight, "submit", submitting)


def bad_later_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of a later turn of an agent is sometimes no word that the model knows."""
    parts = FakeServer.parts

    def sometimes(server: FakeServer, prompt: list[int], options: Any, n: int) -> Any:
        found = parts(server, prompt, options, n)
        return [([10**6, *ids[1:]] if n == 1 and ids[0] % 3 == 0 else ids, *rest) for ids, *rest in found]

    monkeypatch.setattr(FakeServer, "parts", sometimes)


def fail_later_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every :class:`FakeServer` be gone when a turn after the first one is asked for."""
    parts = FakeServer.parts

    def fail(server: FakeServer, prompt: list[int], options: Any, n: int) -> Any:
        if n == 1:  # a later turn
            raise OSError("the network is gone")
        return parts(server, prompt, options, n)

    monkeypatch.setattr(FakeServer, "parts", fail)


def lags_by_step(rollouts: Any) -> list[list[int]]:
    """By optimizer step: the lags of the rows' tokens, without repetition.

    Args:
        rollouts: the frame of a run's ``rollouts.parquet``.
    """
    return [
        sorted({int(step - version) for row in part.policy_versions for version in row})
        for step, part in rollouts.groupby("step")
    ]
