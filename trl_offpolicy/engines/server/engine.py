"""A stock vLLM server as the engine, on any machine: weights through a shared folder, or the LoRA adapter alone."""

from __future__ import annotations

import logging
import shutil
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from filelock import FileLock
from torch import Tensor

from trl_offpolicy.engines.drafts import drafts_of_server
from trl_offpolicy.engines.engine import EngineError, Rollouts, Sampling, SyncError, SyncReport
from trl_offpolicy.engines.interview import Interview
from trl_offpolicy.engines.kept import ARGUMENT, EVERY
from trl_offpolicy.engines.rounding import parse_rounding, round_weights
from trl_offpolicy.engines.server.answers import (
    Answer,
    as_completion,
    choices_of,
    require_room,
    sampled_logps,
    sampled_mask,
    sampled_routes,
    scored,
)
from trl_offpolicy.engines.server.checks import (
    COMPLETIONS,
    GENERATE,
    broadcast_ends,
    reload_method,
    require_ready,
    reset_prefix_cache,
    server_config,
    why_no_mask,
)
from trl_offpolicy.engines.server.client import Patience, ServerClient
from trl_offpolicy.engines.server.contact import Refused, meet
from trl_offpolicy.engines.server.interview import interview_server
from trl_offpolicy.engines.server.labels import ADAPTER, FRESH, is_loading, loading, refusal, unusable
from trl_offpolicy.engines.server.parallel import at_once
from trl_offpolicy.engines.sync_watch import Precision, torch_dtype
from trl_offpolicy.engines.truncation import truncation_of
from trl_offpolicy.engines.weights.broadcast import Sender, own_address
from trl_offpolicy.engines.weights.files import (
    WeightVersions,
    require_writable,
    safe_child,
    write_adapter,
    write_weights,
)
from trl_offpolicy.engines.weights.shapes import why_not, why_not_adapter
from trl_offpolicy.engines.weights.source import Adapter, WeightSource
from trl_offpolicy.engines.worker import WorkerExtension

logger = logging.getLogger(__name__)

Transfer = Literal["auto", "folder", "adapter", "broadcast"]
MAIN_PATIENCE = 60.0
"""Seconds that another rank waits for the main one to send the weights to a server that was started anew."""
_LOADS = 3
"""Times that weights are sent to a server that is started anew while it loads them."""
_RECOVERIES = 2  # vLLM's first load after a failed one can meet what that one left


class _StartedAnew(Exception):
    """The server was started anew between a load and its label."""


class ServerEngine:
    """Client of a vLLM server (``trl-offpolicy serve``) that sees the same file system.

    A finished prompt is never requested again: after a fault only the missing completions are. A server that came back
    with old weights gets the last ones again. A server to which another run has written is an error.

    Args:
        base_url: ``http://127.0.0.1:8000``.
        folder: weights are written here, one folder per version; the last two are kept.
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
        self.folder = Path(folder).resolve()
        self.transfer = transfer
        self.weight_rounding = weight_rounding
        self.return_routing = return_routing
        self.run = run or uuid.uuid4().hex[:12]
        self._source: WeightSource | None = None
        self._resending = threading.Lock()
        self._sent: Path | None = None
        self._adapter: str | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}  # of what was written last
        self._versions = WeightVersions(self.folder, self.run)
        self._held: tuple[str, str] | None = None  # folder and label of the base weights that it took last
        base, self._routes = meet(self.client)
        self.model = str(base["id"])
        self.context_length: int | None = base.get("max_model_len")
        """Tokens of prompt and completion that the server takes; None = it does not tell."""
        config = server_config(self.client, self._routes)
        self.drafts = drafts_of_server(self.client, config)
        """Counts the tokens of a speculative draft; None = there is none."""
        self.findings = require_ready(self.client, config, return_routing=return_routing)
        self._reload_method = reload_method(config)
        self._broadcast: Sender | None = None
        self._fits = False
        if transfer == "broadcast":
            self._ends = broadcast_ends(self.client, config, has_gpu=torch.cuda.is_available())
        model = config.get("model_config") or {}
        self.no_mask = why_no_mask(config, self._routes)
        """Why its rollouts do not say which tokens truncated sampling kept; None = they do."""
        self._needs_top_k = bool(model.get(ARGUMENT))
        self._most = int((config.get("scheduler_config") or {}).get("max_num_seqs") or 1)
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

    # ------------------------------------------------------------------------------------------------------ sampling

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int = 1) -> Rollouts:
        """``n`` completions of each prompt, prompt-major.

        Raises:
            EngineUnreachable: the server stayed away for all retries, or kept on returning too few completions.
            EngineError: another run has put its weights on the server.
        """
        options = {**sampling.vllm_options(), "n": n, "return_token_ids": True}
        answers = at_once(lambda ids: self._complete(list(ids), options, n), prompt_ids)
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
            sampling_mask=[sampled_mask(choice) for choice in choices] if self._reports(options) else None,
        )

    def score(self, ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (nats, temperature 1) of tokens 1, 2, ... of each sequence."""
        require_room(ids, self.context_length, f"the vLLM server at {self.client.base_url}")
        body = {"prompt": [list(row) for row in ids], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        return scored(ids, self._post_completion(self._with_top_k(body)), self.client.base_url)

    def parts(self, prompt: list[int], options: dict[str, Any], n: int) -> list[Answer]:
        """``n`` completions; their finish reason is "abort" where :meth:`cut` ended one early."""
        choices = self._complete(prompt, {**options, "return_token_ids": True}, n)
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

    def _complete(self, prompt: list[int], options: dict[str, Any], n: int) -> list[dict[str, Any]]:
        """The ``n`` completions of a prompt; if the server returns fewer, the rest is requested again."""
        if self._reports(options):
            return self._complete_with_masks(prompt, options, n)
        found: list[dict[str, Any]] = []
        for _ in range(self.client.patience.retries + 1):
            answer = self._post_completion({**self._with_top_k(options), "prompt": prompt, "n": n - len(found)})
            found += choices_of(answer, self.client.base_url)
            if len(found) >= n:
                return found[:n]
            logger.warning("The server returned %d of %d completions; asking for the rest.", len(found), n)
        raise EngineError(f"The vLLM server returned {len(found)} completions, but {n} were asked for.")

    def _complete_with_masks(self, prompt: list[int], options: dict[str, Any], n: int) -> list[dict[str, Any]]:
        """The same from the route that reports the sampling mask, which takes few completions at a time."""
        sampling = {name: value for name, value in self._with_top_k(options).items() if name != "return_token_ids"}
        found: list[dict[str, Any]] = []
        while len(found) < n:
            body = {"token_ids": prompt, "sampling_params": {**sampling, "n": min(n - len(found), self._most)}}
            choices = choices_of(self._post_completion(body, GENERATE), self.client.base_url, route=GENERATE)
            if not choices:
                raise EngineError(f"The vLLM server returned {len(found)} completions, but {n} were asked for.")
            found += map(as_completion, choices)
        return found[:n]

    def _reports(self, options: Mapping[str, Any]) -> bool:
        """True if the answers to requests with these options say which tokens were kept."""
        return self.no_mask is None and bool(truncation_of(options))

    def _with_top_k(self, body: dict[str, Any]) -> dict[str, Any]:
        """A request with a ``top_k``, which cuts nothing where it has none: a server that reports masks wants one."""
        return {**body, "top_k": EVERY} if self._needs_top_k and body.get("top_k", 0) <= 0 else body

    def _post_completion(self, body: dict[str, Any], route: str = COMPLETIONS) -> Any:
        def send() -> Any:
            named = {**body, "model": self._adapter or self.model}
            return self.client.post(route, named, recover=self._ensure_current)

        self._ensure_current()  # a server that came back between two requests has old weights
        try:
            return send()
        except Refused as error:
            if error.status != 404 or self._adapter is None:
                raise EngineError(f"The vLLM server at {self.client.base_url} refused a request: {error}") from error
            self._ensure_current()  # the adapter is gone, so the server has started anew
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
        adapter = self._source.adapter() if self.takes_adapter else None
        if self.transfer == "adapter" and adapter is None:
            raise SyncError(
                "transfer must be 'folder': the model has no adapter that stands alone, or the server was not started "
                "with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True."
            )
        if self.transfer == "broadcast":
            size = self._send_by_broadcast(version)
            return SyncReport(version=version, kind="broadcast", bytes=size, seconds=time.monotonic() - start)
        target = safe_child(self.folder, f"{self.run}-{version}")
        self._shapes = {}
        if adapter is not None:
            self._require_own_base()
            self._shapes = {name: tuple(tensor.shape) for name, tensor in adapter.tensors.items()}
            size = self._written(target, adapter=adapter)
        else:
            gathered, weights = self._merged()
            try:
                size = self._written(target, weights=weights)
            except (EngineError, OSError):
                for _ in gathered:  # go on gathering: the other ranks do so too, and would wait for this one
                    pass
                raise
        before = self.version, self._adapter
        self.version = version
        self._adapter = None if adapter is None else f"policy-{target.name}"
        if self._source.is_main:
            try:
                self._load(target)
            except EngineError:
                self.version, self._adapter = before
                shutil.rmtree(target, ignore_errors=True)
                raise
            self._tidy(target, before[1])
        self._sent = target  # of the other ranks too: each checks that the server holds it
        kind = "folder" if adapter is None else "adapter"
        return SyncReport(version=version, kind=kind, bytes=size, seconds=time.monotonic() - start)

    def _written(
        self, target: Path, *, weights: Iterable[tuple[str, Tensor]] = (), adapter: Adapter | None = None
    ) -> int:
        """Write a version on the main rank, and let the weights pass on the others; returns the bytes."""
        assert self._source is not None
        if not self._source.is_main:
            return sum(0 for _ in weights)
        self._versions.claim()
        if adapter is not None:
            return write_adapter(target, adapter.config, adapter.tensors)
        return write_weights(target, self._noted(weights))

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
            self._broadcast = self._sender()
        before = self._server_label()
        self._set_label(loading(self._label))
        try:
            size = self._broadcast(weights)
            reset_prefix_cache(self.client)
        except SyncError as error:
            self._broadcast.close()  # a group in which a transfer broke off is of no further use
            self._broadcast = None
            raise SyncError(f"{error} {self._recover(before, str(error))}") from error
        if not self._labelled():
            raise SyncError(f"The vLLM server at {self.client.base_url} was started anew while it took the weights.")
        return size

    def _sender(self) -> Sender:
        def call(method: str, **kwargs: Any) -> Any:
            body = {"method": method, "kwargs": kwargs}
            return self.client.once("POST", "/collective_rpc", json=body, final=500, bounded=False)

        workers, backend = self._ends
        timeout = self.client.patience.timeout
        try:
            address = own_address(self.client.host, self.client.port)
        except OSError as error:
            raise SyncError(f"The way to {self.client.base_url} is not known: {error}. Nothing was sent.") from error
        return Sender(call, address=address, workers=workers, backend=backend, timeout=timeout)

    @property
    def precision(self) -> Precision:
        """How the server holds its weights."""
        rounding = None if self.weight_rounding is None else parse_rounding(self.weight_rounding)
        return Precision(self._dtype, rounding)

    @property
    def takes_adapter(self) -> bool:
        """True if an adapter would be sent without the base weights, given that it is all that was trained."""
        loads = "/v1/load_lora_adapter" in self._routes
        return self.transfer in ("auto", "adapter") and loads and self.weight_rounding is None

    def _load(self, target: Path) -> None:
        """Have the server load a folder and label it. It never keeps its old label on weights that it half took.

        Raises:
            SyncError: it did not load them; the message says which weights it has then.
        """
        self._require_fit()
        for _ in range(_LOADS):
            before = self._server_label()
            self._take(target, before)
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
        try:
            if self._adapter is None:
                self._set_label(loading(self._label))
                self._reload(target)
            else:
                self._load_adapter(target)
        except Refused as error:
            text = f"The vLLM server at {self.client.base_url} did not load {target}: {error}."
            raise SyncError(text if self._adapter else f"{text} {self._recover(before, str(error))}") from error
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

        def require_same_server() -> None:
            if looks and self._server_label() == FRESH:
                raise _StartedAnew

        try:
            require_same_server()
            self._set_label(self._label, recover=require_same_server)
        except _StartedAnew:
            return False
        return True

    def _require_fit(self) -> None:
        """Raise if names or shapes of the weights are not those of the server's model. Nothing has been sent then.

        Raises:
            SyncError: they are of another model; the message names the first difference.
        """
        if self._reload_method != WorkerExtension.reload_experts.__name__:
            return  # not started by `trl-offpolicy serve`: its worker cannot be asked
        body = {"method": WorkerExtension.offpolicy_shapes.__name__}
        try:
            answers = self.client.post("/collective_rpc", body, final=500)["results"]
        except Refused as error:  # another version of vLLM, whose layers say less
            logger.warning("The server's shapes could not be compared before the sync: %s", error)
            return
        reason = (why_not if self._adapter is None else why_not_adapter)(self._shapes, answers)
        if reason is not None:
            raise SyncError(
                f"The vLLM server at {self.client.base_url} runs another model ({self._started_with}) than the "
                f"trainer: {reason}. Nothing was sent. Start it with the model that is trained."
            )

    def _recover(self, before: str, error: str) -> str:
        """After a failed load, give the server the weights that it had; returns what it has now, in words.

        Args:
            before: its label before the load.
            error: why the load failed.
        """
        known = {FRESH: self._started_with} | ({} if self._held is None else {self._held[1]: self._held[0]})
        old = known.get(before)
        # A worker that is not this kit's keeps pieces of the failed load, which its next load completes or drops.
        loads = 1 if self._reload_method == WorkerExtension.reload_experts.__name__ else 2
        for _ in range(_RECOVERIES if old is not None else 0):
            try:
                for _ in range(loads):
                    self._reload(old)
                reset_prefix_cache(self.client)
                self._set_label(before)
            except EngineError as again:
                error = f"{error}; nor could the weights before it be loaded again: {again}"
                continue
            name = "the weights that it was started with" if before == FRESH else f"the weights of {before}"
            return f"It has {name} again."
        try:
            if before != FRESH and self._server_label() == FRESH:
                return "It was started anew meanwhile, and has the weights that it was started with."
            self._set_label(unusable(f"the load of {self._label} failed ({error})"))
        except EngineError as gone:
            return f"What it has now is not known: {gone}"
        return (
            "Its weights are now those of no version: it is marked unusable, and refuses requests until it is started "
            "again or takes whole weights."
        )

    def _tidy(self, target: Path, old_adapter: str | None) -> None:
        """Unload the previous version, and keep only the last two folders of this run, and none of runs that died."""
        if old_adapter not in (None, self._adapter):
            self._forget(str(old_adapter))
        self._versions.keep([path.name for path in (target, self._sent) if path is not None])

    def _reload(self, target: str | Path | None) -> None:
        body = {"method": self._reload_method, "kwargs": {"weights_path": str(target)}}
        self.client.post("/collective_rpc", body, final=500)

    def _load_adapter(self, target: Path) -> None:
        try:
            self.client.post("/v1/load_lora_adapter", {"lora_name": self._adapter, "lora_path": str(target)})
        except Refused as error:
            if "already been loaded" not in str(error):
                raise

    def _forget(self, adapter: str) -> None:
        try:
            self.client.once("POST", "/v1/unload_lora_adapter", json={"lora_name": adapter})
        except Exception as error:
            logger.warning("The old adapter %s could not be unloaded: %s", adapter, error)

    @property
    def _label(self) -> str:
        return f"{self.run}:{self.version}{'' if self._adapter is None else ADAPTER}"

    def _set_label(self, label: str, **kwargs: Any) -> None:
        self.client.post("/update_weight_version", {"new_version": label}, **kwargs)

    def _require_own_base(self) -> None:
        """Raise unless the server has the base weights that it was started with, on which an adapter belongs."""
        label = self._server_label()
        if self._sent is None and label != FRESH and not label.endswith(ADAPTER):
            raise EngineError(
                f"The base weights of the vLLM server at {self.client.base_url} were changed by another run ({label}); "
                "an adapter on top would be another policy. Start the server again, or use transfer='folder'."
            )

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
            self._wait_for_main()
            return
        # Of many requests of all ranks that find the server fresh, one sends; the others wait. If they sent too, their
        # reset of the prefix cache would meet the requests of those that had gone on.
        with self._resending, FileLock(self._lock):
            if not self._holds_own():
                logger.warning("The server lacks version %s (started anew?): sending it again.", self.version)
                self._load(self._sent)

    @property
    def _lock(self) -> Path:
        return self._versions.lock

    def _wait_for_main(self) -> None:
        """Wait until the main rank, which meets the same server, has sent the weights again."""
        until = time.monotonic() + MAIN_PATIENCE
        while not self._holds_own():
            if time.monotonic() > until:
                raise EngineError(
                    f"The vLLM server at {self.client.base_url} was started anew and lacks version {self.version}, "
                    f"which this rank cannot send: {self._sent} is on another machine. Put engine.folder on a disk "
                    "that all machines share."
                )
            time.sleep(0.1)

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
