"""A stock vLLM server as the engine, on any machine: weights through a shared folder, or the LoRA adapter alone."""

from __future__ import annotations

import logging
import shutil
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from filelock import FileLock
from torch import Tensor

from trl_offpolicy.engines.drafts import drafts_of_server
from trl_offpolicy.engines.engine import EngineError, Rollouts, Sampling, SyncError, SyncReport
from trl_offpolicy.engines.interview import Interview
from trl_offpolicy.engines.kept import ARGUMENT
from trl_offpolicy.engines.rounding import parse_rounding, round_weights
from trl_offpolicy.engines.server.adapters import ServerAdapters
from trl_offpolicy.engines.server.answers import (
    Answer,
    require_room,
    sampled_logps,
    sampled_mask,
    sampled_routes,
    scored,
)
from trl_offpolicy.engines.server.checks import (
    COMPLETIONS,
    before_others,
    broadcast_ends,
    reload_method,
    require_fit,
    require_own_base,
    require_ready,
    reset_prefix_cache,
    sender_to,
    server_config,
    why_no_mask,
)
from trl_offpolicy.engines.server.client import Patience, ServerClient
from trl_offpolicy.engines.server.completions import Completions
from trl_offpolicy.engines.server.contact import Refused, meet
from trl_offpolicy.engines.server.interview import interview_server
from trl_offpolicy.engines.server.labels import ADAPTER, FRESH, is_loading, loading, refusal, unusable
from trl_offpolicy.engines.server.parallel import at_once
from trl_offpolicy.engines.server.recovery import recover, waited
from trl_offpolicy.engines.sync_watch import Precision, torch_dtype
from trl_offpolicy.engines.weights.broadcast import Sender
from trl_offpolicy.engines.weights.changed import ChangedWeights
from trl_offpolicy.engines.weights.files import (
    WeightVersions,
    chain_of,
    require_writable,
    safe_child,
    shares_base,
    weights_folder,
    write_adapter,
    write_weights,
)
from trl_offpolicy.engines.weights.source import Adapter, WeightSource
from trl_offpolicy.engines.worker import WorkerExtension

logger = logging.getLogger(__name__)

Transfer = Literal["auto", "folder", "adapter", "broadcast"]
MAIN_PATIENCE = 60.0
"""Seconds that another rank waits for the main one to send the weights to a server that was started anew."""
_LOADS = 3
"""Times that weights are sent to a server that is started anew while it loads them."""


class _StartedAnew(Exception):
    """The server was started anew between a load and its label."""


class ServerEngine:
    """Client of a vLLM server (``trl-offpolicy serve``) that sees the same file system.

    A finished prompt is never requested again: after a fault only the missing completions are. A server that came back
    with old weights gets the last ones again. A server to which another run has written is an error.

    Args:
        base_url: ``http://127.0.0.1:8000``.
        folder: weights are written here, one folder per version; the last two are kept, and what is in use. "memory" =
            shared memory, for a server on this machine.
        transfer: "folder" sends merged weights, "adapter" the LoRA adapter (a few MB). "auto" sends the adapter if it
            is all that is trained and the server can load it, else through a folder. "broadcast" sends merged weights
            straight into the server's workers (NCCL between GPUs, else Gloo), without a disk; a server that is started
            anew then ends the run.
        weight_rounding: rounds what goes through a folder: :func:`~trl_offpolicy.engines.rounding.round_weights`.
        return_routing: for a mixture of experts: rollouts say to which experts each token was sent.
        api_key: see :class:`~trl_offpolicy.engines.server.client.ServerClient`.
        patience: time limits and retries.
        run: name of the run in the labels of its weights, the same on all ranks; None = a new one.

    Raises:
        EngineError: the server lacks an ability; the message names the flag for it.
    """

    version: int | None = None

    def __init__(
        self,
        base_url: str,
        *,
        folder: str | Path,
        transfer: Transfer = "auto",
        weight_rounding: Any = None,
        return_routing: bool = False,
        api_key: str | None = None,
        patience: Patience | None = None,
        run: str | None = None,
    ) -> None:
        if transfer not in get_args(Transfer):
            raise ValueError(f"transfer must be one of {list(get_args(Transfer))}, but got {transfer!r}.")
        self.client = ServerClient(base_url, api_key=api_key, patience=patience)
        self.folder = weights_folder(folder)
        self.transfer = transfer
        self.weight_rounding = weight_rounding
        self.return_routing = return_routing
        self.run = run or uuid.uuid4().hex[:12]
        self._source: WeightSource | None = None
        self._resending = threading.Lock()
        self._sent: Path | None = None
        self._adapter: str | None = None
        self._adapters = ServerAdapters(self.client, self.folder, self.run)
        self._shapes: dict[str, tuple[int, ...]] = {}  # of what was written last
        self._versions = WeightVersions(self.folder, self.run)
        self._held: tuple[str, str] | None = None  # folder and label of the base weights that it took last
        self._whole: Path | None = None  # folder of the last whole weights; what changed later is in one of its own
        self._taken: str | None = None  # label of the weights that it took last by broadcast
        base, self._routes = meet(self.client)
        self.model = str(base["id"])
        self.context_length: int | None = base.get("max_model_len")
        """Tokens of prompt and completion that the server takes; None = it does not tell."""
        config = server_config(self.client, self._routes)
        self.drafts = drafts_of_server(self.client, config)
        """Counts the tokens of a speculative draft; None = there is none."""
        self.findings = require_ready(self.client, config, return_routing=return_routing)
        self._reload_method = reload_method(config)
        self._is_own_worker = self._reload_method == WorkerExtension.reload_experts.__name__
        self._changed = ChangedWeights(whole_only=not self._is_own_worker)
        self._broadcast: Sender | None = None
        self._fits = False
        if transfer == "broadcast":
            self._ends = broadcast_ends(self.client, config, has_gpu=torch.cuda.is_available())
        model = config.get("model_config") or {}
        self.no_mask = why_no_mask(config, self._routes)
        """Why its rollouts do not say which tokens truncated sampling kept; None = they do."""
        self.most_adapters: int | None = (config.get("lora_config") or {}).get("max_loras")
        """Adapters that can sample at the same time; None = it does not tell, or takes none."""
        self._completions = Completions(
            self._post_completion,
            base_url=self.client.base_url,
            masks=self.no_mask is None,
            needs_top_k=bool(model.get(ARGUMENT)),
            most=int((config.get("scheduler_config") or {}).get("max_num_seqs") or 1),
            tries=self.client.patience.retries + 1,
        )
        self._first = before_others(config)
        self.keeps_kv = bool(config.get("kv_transfer_config"))
        """Whether a connector keeps keys and values beyond the prefix cache."""
        self._started_with: str | None = model.get("model")
        self._dtype = torch_dtype(model.get("dtype")) if model.get("quantization") is None else None

    def bind(self, source: WeightSource) -> None:
        """Set the source whose weights :meth:`sync_weights` takes.

        Raises:
            ValueError: this rank writes the weights, and cannot write into the folder.
        """
        if source.is_main and self.transfer != "broadcast":
            require_writable(self.folder, where="engine.folder")
        self._source = source

    def serve_several(self, in_use: Callable[[], Collection[int]] | None) -> None:
        """From now on a sync leaves requests in flight the adapter that they began with, and stops none of them.

        Args:
            in_use: returns the versions whose adapters are kept, as requests in flight began with them; None ends it.
        """
        self._adapters.in_use = in_use

    # ------------------------------------------------------------------------------------------------------ sampling

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int = 1) -> Rollouts:
        """``n`` completions of each prompt, prompt-major.

        Raises:
            EngineUnreachable: the server stayed away for all retries, or kept on returning too few completions.
            EngineError: another run has put its weights on the server.
        """
        options = {**sampling.vllm_options(), "n": n, "return_token_ids": True}
        answers = at_once(lambda ids: self._completions(list(ids), options, n), prompt_ids)
        self._ensure_current()
        choices = [choice for answer in answers for choice in answer]
        completions = [list(choice["token_ids"]) for choice in choices]
        version = -1 if self.version is None else self.version
        prompts = [list(ids) for ids in prompt_ids for _ in range(n)]
        return Rollouts(
            prompt_ids=prompts,
            completion_ids=completions,
            sampling_per_token_logps=[sampled_logps(choice) for choice in choices],
            policy_versions=[[version] * len(ids) for ids in completions],
            finish_reasons=[str(choice["finish_reason"]) for choice in choices],
            routed_experts=list(map(sampled_routes, prompts, choices)) if self.return_routing else None,
            sampling_mask=[sampled_mask(choice) for choice in choices] if self._completions.reports(options) else None,
        )

    def score(self, ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (nats, temperature 1) of tokens 1, 2, ... of each sequence."""
        require_room(ids, self.context_length, f"the vLLM server at {self.client.base_url}")
        rows = [list(row) for row in ids]
        body = {"prompt": rows, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, **self._first}
        return scored(ids, self._post_completion(self._completions.with_top_k(body)), self.client.base_url)

    def parts(self, prompt: list[int], options: dict[str, Any], n: int, *, version: int | None = None) -> list[Answer]:
        """``n`` completions; their finish reason is "abort" where :meth:`cut` ended one early.

        Args:
            prompt: token ids.
            options: fields of the request.
            n: number of completions.
            version: of the adapter that samples them (:meth:`serve_several`); None = the weights of now.
        """
        model = None if version is None else self._adapters.name_of(version)
        choices = self._completions(prompt, {**options, "return_token_ids": True}, n, model=model)
        return [
            Answer(
                list(choice["token_ids"]),
                sampled_logps(choice),
                str(choice["finish_reason"]),
                sampled_mask(choice),
                sampled_routes(prompt, choice) if self.return_routing and choice["token_ids"] else None,
            )
            for choice in choices
        ]

    @property
    def can_cut(self) -> bool:
        """True if the server can end requests early and return what they have (vLLM's ``/abort_requests``)."""
        return "/abort_requests" in self._routes

    def cut(self) -> None:
        """End every request at once; each returns what it has. Errors of the server are left to the requests."""
        try:
            self.client.once("POST", "/abort_requests", json={})
        except Exception as error:
            logger.warning("The requests in flight could not be cut: %s", error)

    def _post_completion(self, body: dict[str, Any], route: str = COMPLETIONS) -> Any:
        def send() -> Any:
            named = {"model": self._adapter or self.model, **body}
            return self.client.post(route, named, recover=self._ensure_current)

        self._ensure_current()  # a server that came back between two requests has old weights
        try:
            return send()
        except Refused as error:
            if error.status != 404 or self._adapter is None:
                raise EngineError(f"The vLLM server at {self.client.base_url} refused a request: {error}") from error
            self._ensure_current()  # the adapter is gone, so the server has started anew
            self._adapters.load(body.get("model") or self._adapter)
            return send()

    # ----------------------------------------------------------------------------------------------------- weights

    def sync_weights(self, version: int) -> SyncReport:
        """Write the weights, let the server load them, and label them. Every rank calls it; the main rank sends.

        Raises:
            SyncError: the weights could not be written, or not be loaded.
        """
        if self._source is None:
            raise EngineError("bind(source) must be called before sync_weights, but no source is bound.")
        start = time.monotonic()
        self._adapters.begin_sync()
        adapter = self._source.adapter() if self.takes_adapter else None
        if self.transfer == "adapter" and adapter is None:
            raise SyncError(
                "transfer must be 'folder': the model has no adapter that stands alone, or the server was not started "
                "with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True."
            )
        if self._adapters.in_use is not None and adapter is None:
            for _ in range(self.passes):  # the other ranks gather the weights, and would wait for this one
                deque(self._source.merged(), maxlen=0)
            raise SyncError(
                "async_rollouts.partial must be 'finish' or 'continue': the model has no adapter that stands alone, "
                "and requests in flight would go on with other weights."
            )
        if self.transfer == "broadcast":
            size = self._send_by_broadcast(version)
            whole, seconds = not self._changed.sent_part, time.monotonic() - start
            return SyncReport(version=version, kind="broadcast", bytes=size, seconds=seconds, whole=whole)
        target = safe_child(self.folder, f"{self.run}-{version}")
        self._shapes = {}
        if adapter is not None:
            if self._sent is None:
                require_own_base(self.client.base_url, self._server_label())
            self._shapes = {name: tuple(tensor.shape) for name, tensor in adapter.tensors.items()}
            size = self._written(target, adapter=adapter)
        else:
            gathered, weights = self._merged()
            try:
                size = self._written(target, weights=weights, base=self._base_of(target))
            except (EngineError, OSError):
                for _ in gathered:  # go on gathering: the other ranks do so too, and would wait for this one
                    pass
                raise
        with self._resending:  # a request in flight that finds the server started anew waits for the new version
            before = self.version, self._adapter
            self.version = version
            self._adapter = None if adapter is None else self._adapters.new_name(version)
            if self._source.is_main:
                try:
                    self._load(target)
                except EngineError:
                    self._adapters.forget(self._adapter)
                    self.version, self._adapter = before
                    shutil.rmtree(target, ignore_errors=True)
                    raise
                self._tidy(target)
            self._sent = target  # of the other ranks too: each checks that the server holds it
        kind = "folder" if adapter is None else "adapter"
        whole = adapter is not None or not self._changed.sent_part
        return SyncReport(version=version, kind=kind, bytes=size, seconds=time.monotonic() - start, whole=whole)

    def confirm(self, proven: bool) -> bool:
        """See :meth:`~trl_offpolicy.engines.weights.changed.ChangedWeights.confirm`."""
        return self._changed.confirm(proven)

    def _base_of(self, target: Path) -> Path | None:
        """The folder of the weights that the next sync may leave out; None = it must write all."""
        base = self._whole
        usable = self._changed.partial and base is not None and base != target
        return base if usable and base is not None and base.is_dir() else None

    def _written(
        self,
        target: Path,
        *,
        weights: Iterable[tuple[str, Tensor]] = (),
        adapter: Adapter | None = None,
        base: Path | None = None,
    ) -> int:
        """Write a version on the main rank, and let the weights pass on the others; returns the bytes."""
        assert self._source is not None
        if not self._source.is_main:
            return sum(0 for _ in weights)
        self._versions.claim()
        if adapter is not None:
            return write_adapter(target, adapter.config, adapter.tensors)
        selected = self._changed.select(self._noted(weights), whole=base is None)
        size = write_weights(target, selected, base=base)
        self._whole = base or target
        return size

    def _merged(self) -> tuple[Iterator[tuple[str, Tensor]], Iterator[tuple[str, Tensor]]]:
        """The source's weights, and the same rounded as the server is to hold them."""
        assert self._source is not None
        gathered = self._source.merged()
        return gathered, gathered if self.weight_rounding is None else round_weights(gathered, self.weight_rounding)

    def _noted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self._shapes[name] = tuple(tensor.shape)
            yield name, tensor

    def _send_by_broadcast(self, version: int) -> int:
        """Send the weights into the server's workers; returns the bytes. The other ranks take part in gathering."""
        assert self._source is not None
        if self.passes > 1:
            for _ in self._noted(self._source.merged()):
                pass
        gathered, weights = self._merged()
        before, self.version = self.version, version
        if not self._source.is_main:
            self._sent = self.folder / f"{self.run}-{version}"
            return sum(0 for _ in weights)
        try:
            if not self._fits:
                self._require_fit()
                self._fits = True
            size = self._broadcast_labelled(weights)
        except EngineError:
            self.version = before
            for _ in gathered:  # go on gathering: the other ranks do so too, and would wait for this one
                pass
            raise
        self._sent = self.folder / f"{self.run}-{version}"
        return size

    @property
    def passes(self) -> int:
        """How often the next sync gathers the weights. All ranks must take part in each.

        The first broadcast gathers them twice: once for their shapes, which are compared before anything is sent.
        """
        return 2 if self.transfer == "broadcast" and not self._shapes else 1

    def _broadcast_labelled(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        """Broadcast under the label of a load in progress, as :meth:`_load` does with a folder; returns the bytes."""
        if self._broadcast is None:
            self._broadcast = sender_to(self.client, self._ends)
        before = self._server_label()
        self._set_label(loading(self._label))
        weights = self._changed.select(weights, whole=before != self._taken)
        try:
            size = self._broadcast(weights, part=self._changed.sent_part)
            reset_prefix_cache(self.client)
        except SyncError as error:
            self._broadcast.close()  # a group in which a transfer broke off is of no further use
            self._broadcast = None
            raise SyncError(f"{error} {self._recover(before, str(error))}") from error
        if not self._labelled():
            raise SyncError(f"The vLLM server at {self.client.base_url} was started anew while it took the weights.")
        self._taken = self._label
        return size

    @property
    def precision(self) -> Precision:
        """How the server holds its weights."""
        rounding = None if self.weight_rounding is None else parse_rounding(self.weight_rounding)
        return Precision(self._dtype, rounding)

    @property
    def takes_adapter(self) -> bool:
        """True if an adapter would be sent without the base weights, given that it is all that was trained.

        Not once the server has merged weights: on top of them the adapter would be applied twice.
        """
        loads = "/v1/load_lora_adapter" in self._routes
        own_base = self._sent is None or self._adapter is not None
        return self.transfer in ("auto", "adapter") and loads and self.weight_rounding is None and own_base

    def _load(self, target: Path) -> None:
        """Have the server load a folder and label it. It never keeps its old label on weights that it half took.

        Raises:
            SyncError: it did not load them; the message says which weights it has then.
        """
        self._require_fit()
        for _ in range(_LOADS):
            before = self._server_label()
            try:
                self._take(target, before)
            except _StartedAnew:
                continue
            # before its first adapter a server has the label of a fresh one, and a new start cannot be told
            if self._labelled(looks=self._adapter is None or before != FRESH):
                break
            logger.warning("The server was started anew while it loaded version %s: loading it again.", self.version)
        else:
            raise SyncError(f"The vLLM server at {self.client.base_url} was started anew at each of {_LOADS} loads.")
        if self._adapter is None:
            self._held = str(target), self._label

    def _take(self, target: Path, before: str) -> None:
        """Have the server, whose label is ``before``, load a folder; it is not labelled yet."""
        has_base = self._held is not None and before == self._held[1] and shares_base(target, Path(self._held[0]))
        try:
            if self._adapter is None:
                # a server that is started anew before its label says so gets the base again
                self._set_label(loading(self._label), recover=self._require_not_fresh if has_base else None)
                self._reload(target, has_base=has_base)
            else:
                self._adapters.load(self._adapter)
        except Refused as error:
            text = f"The vLLM server at {self.client.base_url} did not load {target}: {error}."
            raise SyncError(text if self._adapter else f"{text} {self._recover(before, str(error))}") from error
        if self._adapters.in_use is not None and self._sent is not None:
            return  # requests run, and blocks of the prefix cache belong to the adapter that made them
        try:
            reset_prefix_cache(self.client)
        except SyncError as error:
            self._set_label(unusable(str(error)))
            raise

    def _labelled(self, *, looks: bool = True) -> bool:
        """Give the weights that were loaded their label; False if the server was started anew since and lacks them.

        A request that is repeated would otherwise put the label on the weights with which the server was started.

        Args:
            looks: whether the label that it has until then tells a new start.
        """
        try:
            if looks:
                self._require_not_fresh()
            self._set_label(self._label, recover=self._require_not_fresh if looks else None)
        except _StartedAnew:
            return False
        return True

    def _require_not_fresh(self) -> None:
        if self._server_label() == FRESH:
            raise _StartedAnew

    def _require_fit(self) -> None:
        """Raise if the weights are of another model than the server's. Nothing has been sent then."""
        if self._is_own_worker:  # else its worker cannot be asked
            require_fit(self.client, self._shapes, model=self._started_with, adapter=self._adapter is not None)

    def _recover(self, before: str, error: str) -> str:
        """What the server has after a failed load, in words: :func:`~trl_offpolicy.engines.server.recovery.recover`."""
        # A worker that is not this kit's keeps pieces of the failed load, which its next load completes or drops.
        return recover(
            before,
            error,
            known={FRESH: self._started_with} | ({} if self._held is None else {self._held[1]: self._held[0]}),
            loads=1 if self._is_own_worker else 2,
            reload=self._reload,
            reset=lambda: reset_prefix_cache(self.client),
            read_label=self._server_label,
            set_label=self._set_label,
            failed=self._label,
        )

    def _tidy(self, target: Path) -> None:
        """Unload adapters that are not needed, and keep the folders of the others and the last two of this run."""
        live = self._adapters.unload_all_but(self.version if self._adapter else None)
        kept = [path for path in (target, self._sent, self._whole) if path is not None]
        self._versions.keep([*live, *(path.name for one in kept for path in chain_of(one))])

    def _reload(self, target: str | Path, *, has_base: bool = False) -> None:
        """Have the workers load a folder, after the one on which it builds unless they have that."""
        for folder in [target] if has_base else chain_of(Path(target)):
            body = {"method": self._reload_method, "kwargs": {"weights_path": str(folder)}}
            self.client.post("/collective_rpc", body, final=500)

    @property
    def _label(self) -> str:
        return f"{self.run}:{self.version}{'' if self._adapter is None else ADAPTER}"

    def _set_label(self, label: str, **kwargs: Any) -> None:
        self.client.post("/update_weight_version", {"new_version": label}, **kwargs)

    def _server_label(self) -> str:
        return str(self.client.get("/weight_info")["weight_version"])

    def _ensure_current(self) -> None:
        """Make sure that the server holds the weights that this run sent last; after a restart it gets them again.

        Raises:
            EngineError: they are on the disk of the main rank's machine, and it has not sent them again.
        """
        if self._sent is None or self._holds_own():
            return
        if self.transfer == "broadcast":
            raise EngineError(
                f"The vLLM server at {self.client.base_url} was started anew and lacks version {self.version}, of "
                "which a broadcast leaves no copy. Resume from the last checkpoint. With transfer 'folder' a run goes "
                "on by itself."
            )
        if self._versions.removed:
            raise EngineError(
                f"The vLLM server at {self.client.base_url} was started anew after the run had ended, whose weights "
                f"were removed from {self.folder}. Train on, or sync again, before it samples."
            )
        if not self._sent.exists():
            if not waited(self._holds_own, seconds=MAIN_PATIENCE):
                raise EngineError(
                    f"The vLLM server at {self.client.base_url} was started anew and lacks version {self.version}, "
                    f"which this rank cannot send: {self._sent} is on another machine. Put engine.folder on a disk "
                    "that all machines share."
                )
            return
        # Of many requests of all ranks that find the server fresh, one sends; the others wait. If they sent too, their
        # reset of the prefix cache would meet the requests of those that had gone on.
        with self._resending, FileLock(self._versions.lock):
            if not self._holds_own():
                logger.warning("The server lacks version %s (started anew?): sending it again.", self.version)
                self._load(self._sent)

    def _holds_own(self) -> bool:
        """True if the server holds this run's weights, False if it was started anew or is being given them.

        Raises:
            EngineError: it holds weights of another run, or of nobody.
        """
        label = self._server_label()
        if label == FRESH or is_loading(label, self.run):
            return False
        if reason := refusal(label):
            raise EngineError(f"The vLLM server at {self.client.base_url} cannot be used: {reason}. Start it again.")
        if self._adapters.in_use is not None and label.startswith(f"{self.run}:"):
            return True  # beside requests in flight a sync is under way, or has just ended
        if label != self._label:
            raise EngineError(
                f"The vLLM server at {self.client.base_url} holds weights of another run ({label}; this run's are "
                f"{self._label}): two trainers share one server. Give each its own."
            )
        return True

    def interview(self) -> Interview:
        """Ask the server what it really runs with."""
        rounding = self.weight_rounding
        return interview_server(self.client, self._routes, self.model, weight_rounding=rounding, prompt=[0] * 4)

    def close(self) -> None:
        """Delete this run's weight folders, if this rank wrote them; the server is left as it is."""
        self._versions.close()
        if self._broadcast is not None:
            self._broadcast.close()
            self._broadcast = None
