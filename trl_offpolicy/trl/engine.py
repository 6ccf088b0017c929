"""TRL's generation backend over the engine layer, which ``GRPOTrainer`` builds and calls as ``vllm_generation``.

In colocate mode it uses TRL's path and passes engine arguments through; weights are reloaded in memory on a CPU, and
where vLLM changes them after loading. In server mode it uses TRL's NCCL path on a GPU, or a shared folder or the LoRA
adapter alone anywhere (:class:`~trl_offpolicy.engines.server`).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from transformers import ProcessorMixin
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

from trl_offpolicy.engines.colocate import (
    held_dtype,
    noise_in_process,
    reload_in_process,
    reset_prefix_cache,
    score_in_process,
)
from trl_offpolicy.engines.drafts import Drafted, Drafts, drafts_in_process, with_counters
from trl_offpolicy.engines.engine import Call, EngineError, Sampling, SyncReport
from trl_offpolicy.engines.environment import choose_port, cpu_arguments, prepare_environment
from trl_offpolicy.engines.exact import Exact, exact_engine
from trl_offpolicy.engines.interview import Interview, interview_llm
from trl_offpolicy.engines.kept import KeptStore, MaskedLLM, built_with_mask
from trl_offpolicy.engines.norm_noise import NoisyNorms
from trl_offpolicy.engines.rounding import round_weights
from trl_offpolicy.engines.routing.reported import EngineRoutes, RoutedLLM, RouteStore, routing_arguments
from trl_offpolicy.engines.screen import quiet_start, say
from trl_offpolicy.engines.seeds import seed_of_rank
from trl_offpolicy.engines.server.engine import ServerEngine
from trl_offpolicy.engines.settings import EngineSettings
from trl_offpolicy.engines.sync import Gate, WeightSync, raised_on_all_ranks
from trl_offpolicy.engines.sync_watch import Precision
from trl_offpolicy.engines.truncation import truncation_of
from trl_offpolicy.engines.weights.changed import ChangedWeights
from trl_offpolicy.engines.weights.lora import AdapterFolder, adapted_modules, lora_arguments
from trl_offpolicy.engines.weights.shapes import EMBEDDING, HEAD, with_place
from trl_offpolicy.engines.weights.source import Adapter, ModelWeights
from trl_offpolicy.functional.collective import scattered
from trl_offpolicy.functional.truncated_sampling import Truncation
from trl_offpolicy.rollouts.screening import Columns, Screen, Unusable
from trl_offpolicy.trl.in_process import Sleeper, WithAdapter, changes_after_loading, copied
from trl_offpolicy.trl.keyed_client import KeyedClient
from trl_offpolicy.trl.rebinding import rebound


class TRLEngine(vllm_generation.VLLMGeneration):  # type: ignore[misc]
    """TRL's vLLM backend with this kit's transfers.

    Args:
        settings: the parsed ``engine`` field of the configuration.
        folder: where a server's weights are written, unless ``settings`` names a folder.
        rows: rows of one forward of the trainer, for ``engine.exact``; None = any.
        seed: the run's; an engine in this process without a seed of its own draws by it.
        ahead: whether requests will be sent ahead (``async_rollouts``).
        *args: TRL's arguments.
        **kwargs: TRL's keyword arguments.
    """

    llm: Any
    enable_sleep_mode: bool = False
    """Whether TRL frees the memory of an engine in this process between generations; TRL fills it in."""
    last_sync: SyncReport | None = None
    """Cost of the last sync, and how far the engine then agreed with the trainer."""
    ahead: Any = None
    """Answers the trainer's requests from batches that were requested before, with ``async_rollouts``."""
    quiet: Callable[[], AbstractContextManager[None]] = nullcontext
    """A context that is open while weights are replaced."""
    exact: Exact | None = None
    """What ``engine.exact`` has set, in colocate mode."""
    routes: RouteStore | None = None
    """The routing of this rank's rollouts, with ``engine.return_routing``."""
    kept: KeptStore | None = None
    """What truncated sampling kept at each token of this rank's rollouts, if the engine reports it."""
    no_mask: str | None = (
        "TRL's client does not report them; engine.transfer auto (for a text model), broadcast or folder does"
    )
    """Why it does not; None = it does."""
    screen: Screen | None = None
    """Checks every reply, once a trainer has set it."""
    drafts: Drafts | None = None
    """Counts the tokens of a speculative draft; None = there is none, or TRL's client is used."""
    noise: NoisyNorms | None = None
    """Noise that the rollouts of the training are sampled with, with ``engine.norm_noise``."""

    def __init__(
        self,
        *args: Any,
        settings: EngineSettings,
        folder: Path,
        rows: int | None = None,
        seed: int = 0,
        ahead: bool = False,
        **kwargs: Any,
    ) -> None:
        self.settings, self._rows, self._run_seed, self._asks_ahead = settings, rows, seed, ahead
        self._folder = settings.folder or folder
        self._adapters: AdapterFolder | None = None
        self._server: ServerEngine | None = None
        self._on_server = False
        self._changed = ChangedWeights()  # of an engine in this process
        self._sync = WeightSync()  # proves nothing until a trainer says how
        self._log: Callable[[SyncReport], None] = lambda report: None
        self._step: Callable[[], int] = lambda: 0
        self._steps: Callable[[], int] = lambda: 0
        self.calls: list[Call] = []  # what was sampled; whoever reads it empties it
        super().__init__(*args, **kwargs)
        if self._uses_adapter and self.source.adapter() is None:
            raise ValueError(
                "engine.transfer must not be 'adapter' here: that takes a PEFT model with plain LoRA on linear layers "
                "(no lm_head, embeddings, bias, modules_to_save or DoRA; one rank and lora_alpha for all, and an "
                "init_lora_weights that leaves the base weights as they are), which is all that is trained."
            )

    def prove(
        self,
        sync: WeightSync,
        *,
        log: Callable[[SyncReport], None],
        step: Callable[[], int],
        steps: Callable[[], int] = lambda: 0,
    ) -> None:
        """From now on have ``sync`` send the weights and prove them.

        Args:
            sync: the trainer's sync.
            log: called after every sync, on all ranks.
            step: returns the current version of the trainer's weights.
            steps: returns the number of optimizer steps of the run; 0 = not known.
        """
        self._sync, self._log, self._step, self._steps = sync, log, step, steps

    @property
    def proves(self) -> bool:
        """True if each sync is proved on a probe."""
        return self._sync.proves

    def gate_updates(self, gate: Gate) -> None:
        """From now on have ``gate`` judge each update after its proof."""
        self._sync.gate = gate

    @property
    def version(self) -> int:
        """Current version of the trainer's weights, in optimizer steps."""
        return self._step()

    @property
    def source(self) -> TrainerWeights:
        """The trainer's weights, as a source for the engine."""
        return TrainerWeights(self)

    @property
    def server(self) -> ServerEngine | None:
        """The server that this rank talks to; None in colocate mode and on other ranks."""
        return self._server

    @property
    def _uses_adapter(self) -> bool:
        return self.settings.transfer == "adapter"

    # ------------------------------------------------------------------------------------------------------- start

    def _init_vllm(self) -> None:
        if self.mode == "colocate":
            self._start_in_process()
        elif self.settings.on_server(
            self.accelerator.device.type, ahead=self._asks_ahead, truncated=self._asks_for_masks
        ):
            self._connect()
        else:
            with rebound(vllm_generation, VLLMClient=KeyedClient):
                super()._init_vllm()

    def _start_in_process(self) -> None:
        self.settings.check_colocate()
        prepare_environment()
        choose_port(self.accelerator.num_processes)
        arguments = {**self._default_arguments(), **self.settings.arguments, **self._seed()}
        if self.settings.exact:
            arguments = self._exact_arguments(arguments)
        with rebound(vllm_generation, LLM=partial(self._build_llm, vllm_generation.LLM, arguments)):
            super()._init_vllm()
        if self.enable_sleep_mode:
            self.llm = Sleeper(self.llm)
        if self.settings.return_routing:
            self.llm = RoutedLLM(self.llm)
            self.routes = self.llm.store
        if self.settings.norm_noise is not None:
            self.noise = noise_in_process(lambda: self.llm, self.settings.norm_noise)
        if self._uses_adapter:
            self._adapters = AdapterFolder()
            self.llm = WithAdapter(self.llm, self._adapters)

    def _build_llm(self, llm_class: Any, overrides: dict[str, Any], **kwargs: Any) -> Any:
        say("starting vLLM in this process")
        truncated = bool(self._truncation)
        arguments = with_counters({**kwargs, **overrides})
        with quiet_start():
            llm, self.no_mask = built_with_mask(llm_class, arguments, truncated=truncated)
        self.drafts = drafts_in_process(llm, arguments)
        if truncated and isinstance(llm, MaskedLLM):
            self.kept = llm.kept = KeptStore()
        return llm

    @property
    def _truncation(self) -> Truncation:
        options = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        return truncation_of({**options, "generation_kwargs": self.generation_kwargs})

    @property
    def _asks_for_masks(self) -> bool:
        """True if something is cut, and prompts cannot have images, which reach a server by TRL's client alone."""
        return bool(self._truncation) and not isinstance(self.processing_class, ProcessorMixin)

    def _exact_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """TRL makes room for a whole generation; an exact engine runs as many rows as the trainer's forward has."""
        dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        merged = hasattr(self.model, "peft_config") and not self._uses_adapter
        self.exact = exact_engine(arguments, dtype=dtype, rows=self._rows, merged=merged)
        return self.exact.arguments

    def _default_arguments(self) -> dict[str, Any]:
        """On CPU load the engine in the trainer's dtype: vLLM's "auto" would read float32 as bfloat16, slowly."""
        arguments = cpu_arguments()
        if self._on_cpu:
            arguments["dtype"] = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        if self.settings.return_routing:
            arguments |= routing_arguments()
        if self._uses_adapter:
            # of all its layers: an adapter whose rank_pattern gives some another rank is not sent alone
            rank = max(config.r for config in self.model.peft_config.values())
            arguments |= lora_arguments(rank, adapted_modules(self.model))
        return arguments

    def _seed(self) -> dict[str, int]:
        """This rank's part of ``engine.seed``, else of the run's seed. TRL's own counts ranks from 0 in every run."""
        seed = self.settings.arguments.get("seed", self._run_seed)
        rank, size = self.accelerator.process_index, self.tensor_parallel_size
        return {"seed": seed_of_rank(seed, rank, tensor_parallel_size=size)}

    @property
    def _on_cpu(self) -> bool:
        return bool(self.accelerator.device.type == "cpu")

    def _connect(self) -> None:
        """Connect the main rank to the server. The others only take part in gathering weights."""
        self.settings.check_server()
        self._on_server = True
        if self.settings.return_routing:
            self.routes = RouteStore()
        if self.accelerator.is_main_process:
            self._server = ServerEngine(
                self.server_base_url or f"http://{self.server_host}:{self.server_port}",
                folder=self._folder,
                transfer=self.settings.server_transfer,
                weight_rounding=self.settings.weight_rounding,
                return_routing=self.settings.return_routing,
                patience=self.settings.patience(start_timeout=self.server_timeout),
            )
            self._server.bind(self.source)
        self.accelerator.wait_for_everyone()
        server = self._server
        told = [(None, False) if server is None else (server.no_mask, server.drafts is not None)]
        broadcast_object_list(told, from_process=0)
        self.no_mask, drafts = told[0]
        if drafts:  # a rank that does not talk to the server counts nothing, but all ranks have the metric
            self.drafts = Drafts(lambda: Drafted(0, 0)) if server is None else server.drafts
        self.kept = KeptStore() if self.no_mask is None and self._truncation else None
        self._warn_of_slower_weights()

    def _warn_of_slower_weights(self) -> None:
        """Say that NCCL was given up for kept tokens which the server does not report."""
        device = self.accelerator.device.type
        for_masks = self._asks_for_masks and not self.settings.on_server(device, ahead=self._asks_ahead)
        if for_masks and self.no_mask is not None and self.accelerator.is_main_process:
            warnings.warn(
                "engine.transfer auto does not take NCCL, so that the server can say which tokens truncated sampling "
                f"kept, but {self.no_mask}. Let the server report them, or set engine.transfer: nccl.",
                stacklevel=2,
            )

    # ----------------------------------------------------------------------------------------------------- weights

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        named = super()._iter_named_params() if self._is_fsdp1 else ModelWeights(self.model).merged()
        named = self._sync.watch.passing(self._with_place(named))
        rounding = self.settings.weight_rounding if self.mode == "colocate" else None
        return self._counted(named if rounding is None else round_weights(named, rounding))

    def _counted(self, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Count the bytes of this pass alone: TRL's client makes one before the first sync, for names and shapes."""
        self._passed = 0
        for name, tensor in named:
            self._passed += tensor.nbytes
            yield name, tensor

    def _with_place(self, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The weights of TRL's own transfers, which compare no names: an engine that ties its head drops another one.

        Such an engine cannot always be asked, so the model's configuration tells, which it reads as well.
        """
        config = getattr(self.model, "config", None)
        ties = bool(getattr(config, "tie_word_embeddings", False))
        compared = self._on_server or self._reloads
        return named if compared or not ties else with_place(named, (), {HEAD: EMBEDDING})

    @property
    def _reloads(self) -> bool:
        """True if an engine in this process gets its weights by vLLM's reload, which processes them as its first load.

        TRL writes them into the model as they are. That is kept where vLLM leaves them so, on a GPU.
        """
        return self.mode == "colocate" and (self._on_cpu or changes_after_loading(self.llm))

    @property
    def _is_fsdp1(self) -> bool:
        return bool(self._dist.is_fsdp and self._dist.fsdp_version == 1)

    def sync_weights(self) -> None:
        """Send the engine the trainer's weights and prove the sync. TRL calls it on all ranks.

        Raises:
            EngineError: on every rank, if the sync failed on any.
        """
        if self.noise is not None:
            self.noise.off()
        with self.quiet():
            self.last_sync = self._sync(
                self.version,
                send=self._send,
                answer=self.score,
                precision=self._precision(),
                confirm=self.confirm,
            )
            self._log(self.last_sync)

    def _precision(self) -> Precision:
        """How the engine holds its weights; not known of TRL's server, nor on a rank that does not talk to one."""
        if self.mode == "colocate":
            return Precision(held_dtype(self.llm), self.settings.weight_rounding)
        return Precision() if self._server is None else self._server.precision

    def confirm(self, proven: bool) -> bool:
        """See :meth:`~trl_offpolicy.engines.weights.changed.ChangedWeights.confirm`."""
        return (self._changed if self._server is None else self._server).confirm(proven)

    def _send(self, version: int) -> SyncReport:
        start, whole = time.monotonic(), True
        if self._on_server:
            kind, size, whole = self._send_to_server(version)
        elif self._adapters is not None:
            kind, size = "adapter", self._adapters.load(self._own_adapter(), version)
        elif self._reloads:
            (size, whole), kind = self._reload(), "memory"
        else:
            super().sync_weights()
            if self.mode == "colocate":
                reset_prefix_cache(self.llm)  # TRL leaves out what a connector keeps
            kind = "nccl" if self.mode == "server" else "memory"
            size = self._passed if kind == "memory" or self.accelerator.is_main_process else 0
        return SyncReport(version=version, kind=kind, bytes=size, seconds=time.monotonic() - start, whole=whole)

    def _reload(self) -> tuple[int, bool]:
        """Reload the weights of the engine in this process and return (bytes, whether they were all)."""
        if self.enable_sleep_mode:  # as TRL does before it writes them
            vllm_generation.empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        named = copied(self._iter_named_params()) if self._is_fsdp1 else self._iter_named_params()
        if self._on_cpu:  # an engine that slept has lost what it was given before
            named = self._changed.select(named, whole=self.enable_sleep_mode)
        whole = not self._changed.sent_part
        return reload_in_process(self.llm, named, part=not whole), whole

    def _send_to_server(self, version: int) -> tuple[str, int, bool]:
        """Send the weights and return (kind, bytes, whether they were all). All ranks gather, the main one sends."""
        server = self._server
        refused = server is not None and self._uses_adapter and not server.takes_adapter
        how = [(False, 1, False) if server is None else (server.takes_adapter, server.passes, refused)]
        broadcast_object_list(how, from_process=0)
        takes_adapter, passes, refused = how[0]
        if self._server is not None:
            sent = self._server.sync_weights(version)
            return sent.kind, sent.bytes, sent.whole
        if not refused and (not takes_adapter or self.source.adapter() is None):
            for _ in range(passes):
                for _ in self.source.merged():
                    pass
        return "folder", 0, True

    def _own_adapter(self) -> Adapter:
        adapter = self.source.adapter()
        if adapter is None:
            raise EngineError("The adapter can no longer be sent alone: something else became trainable.")
        return adapter

    def score(self, ids: Sequence[Sequence[int]]) -> list[list[float]] | None:
        """The engine's log-probs of a probe (temperature 1); None on ranks that do not talk to it."""
        if self.mode == "colocate":
            if self.enable_sleep_mode:
                self.llm.wake_up(tags=["kv_cache"])  # a sync wakes the weights alone, with which vLLM answers nothing
            return score_in_process(self.llm, ids)
        if self._server is not None:
            return self._server.score(ids)
        if not self.accelerator.is_main_process:
            return None
        rows = [list(row) for row in ids]
        answer = self.vllm_client.get_sequence_logprobs(rows, prompt_lengths=[1] * len(rows), top_logprobs=1)
        return [[place[0] for place in row] for row in answer["actual_logprobs"]]

    def interview(self) -> Interview | None:
        """What can be asked of the engine about itself; None on ranks, and in modes, that cannot ask it."""
        if self.mode == "colocate":
            if self.enable_sleep_mode:
                # Modules are read, which sleep from the start and after each generation. TRL's next generation sends
                # the weights all the same, because _llm_weights_sleeping stays as it is.
                self.llm.wake_up(tags=["weights"])
            return interview_llm(self.llm, weight_rounding=self.settings.weight_rounding)
        return None if self._server is None else self._server.interview()

    # ---------------------------------------------------------------------------------------------------- sampling

    def generate(self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None) -> Any:
        """TRL's contract: (prompt ids, completion ids, log-probs (rows, tokens, 1), their token ids)."""
        if self.noise is not None:
            noise, learning = self.noise.noise, self.model.training
            self.noise.on(self.version, noise.sigma(self.version, self._steps()) if learning else 0.0)
        inner = self._generate_on_server if self._on_server else super().generate
        answer = inner(prompts, images, num_generations, profiler)
        if self.screen is not None:
            answer = self._screened(self.screen, prompts, images, num_generations, answer)
        self.calls += map(Call, prompts, answer[1])
        return answer

    def _screened(self, screen: Screen, prompts: list[list[int]], images: Any, n: int, answer: Any) -> Any:
        """An answer of :meth:`generate` in which a filler stands for every reply that cannot be used."""
        names = ("completion_ids", "logprobs", "token_ids")
        columns: Columns = {name: part for name, part in zip(names, answer[1:], strict=True) if part is not None}
        if "logprobs" in columns:
            columns["logps"] = _first_each(columns["logprobs"])
        ahead = self.ahead if self.ahead is not None and self.model.training else None
        if ahead is not None:
            columns["policy_versions"] = ahead.versions
        sent = self.version if self.last_sync is None else self.last_sync.version

        def fill(row: int, reason: str) -> dict[str, Any]:
            if self.routes is not None:
                self.routes.add_unsampled(prompts[row])
            return _reply([screen.filler], [[Unusable(reason)]], [[screen.filler]], sent)

        def again(rows: list[int]) -> Columns:
            _, ids, logps, tokens = self._again(prompts, images, n, rows)
            replies = [_reply(*one, sent) for one in zip(ids, logps, tokens or ids, strict=True)]
            return {name: [reply[name] for reply in replies] for name in replies[0]} if replies else {}

        columns = screen.replies(columns, prompts, fill, again=again, together=self._together)
        if ahead is not None:
            ahead.versions = columns["policy_versions"]
        return (answer[0], *(columns.get(name) for name in names))

    @property
    def _together(self) -> bool:
        """True if all ranks must ask for replies or none: they share an engine, or each of theirs sleeps."""
        shared = self._on_server or self.mode == "server" or self.tensor_parallel_size > 1
        return bool(shared or self.enable_sleep_mode)  # from its sleep TRL's generation wakes it by a sync of all ranks

    def _again(self, prompts: list[list[int]], images: Any, n: int, rows: list[int]) -> Any:
        """An answer of :meth:`generate` for some rows, sampled anew. Where ranks share an engine, all call it."""
        if self._on_server:
            return self._now([prompts[row] for row in rows], 1)
        if not self._together:
            seen = None if images is None else [images[row] for row in rows]
            return super().generate([prompts[row] for row in rows], seen, 1)
        answer = super().generate(prompts, images, n)  # TRL takes as many prompts of each rank
        return [None if part is None else [part[row] for row in rows] for part in answer]

    def _generate_on_server(self, prompts: list[list[int]], images: Any, num_generations: int, _: Any) -> Any:
        if any(image is not None for image in images or ()):
            raise NotImplementedError("images must be None with engine.transfer folder or adapter; use nccl.")
        if self.ahead is not None and self.model.training:
            return self.ahead.generate(prompts, num_generations)
        return self._now(prompts, num_generations)

    def _now(self, prompts: list[list[int]], n: int) -> Any:
        """:meth:`generate` of the server, at the weights that it has. All ranks call it."""
        ids, logps, routes, kept = self._sampled(gather_object([prompts]), n)
        self.add_reports(prompts, ids, routes=routes, kept=kept)
        return prompts, ids, [[[value] for value in row] for row in logps], [[[token] for token in row] for row in ids]

    def add_reports(
        self,
        prompts: Sequence[Sequence[int]],
        ids: Sequence[Sequence[int]],
        *,
        routes: Sequence[Any],
        kept: Sequence[Any],
    ) -> None:
        """Keep what a server said of its routing, and of the tokens that it kept; empty where it said nothing."""
        if self.routes is not None:
            for prompt, completion, reported in zip(prompts, ids, routes, strict=True):
                if reported is not None:
                    self.routes.add(EngineRoutes((*prompt, *completion)[: len(reported)], reported))
        if self.kept is not None and kept:
            for prompt, completion, mask in zip(prompts, ids, kept, strict=True):
                self.kept.add(prompt, completion, mask)

    def _sampled(self, prompts: list[list[list[int]]], n: int) -> Any:
        """(ids, log-probs, routes, kept ids) that the server sampled for the prompts of this rank.

        Args:
            prompts: prompts by rank; the main rank sends the requests.
            n: each prompt is repeated this many times in a row, for as many completions.

        Raises:
            EngineError: on all ranks, if the server failed.
        """
        parts: list[Any] = []
        with raised_on_all_ranks():
            if self._server is not None:
                asked = [row for rank in prompts for row in rank][::n]
                rollouts = self._server.generate(asked, self._sampling(), n=n)
                columns = (rollouts.completion_ids, rollouts.sampling_per_token_logps or [],
                           rollouts.routed_experts or [], rollouts.sampling_mask or [])  # fmt: skip
                # back to the ranks, each of which may have asked for another number of rows
                ends = accumulate(map(len, prompts), initial=0)
                parts = [tuple(column[i:j] for column in columns) for i, j in pairwise(ends)]
        return scattered(parts)

    def _sampling(self) -> Sampling:
        extra = {"repetition_penalty": self.repetition_penalty, **(self.generation_kwargs or {})}
        if self.structured_outputs_regex is not None:
            extra["structured_outputs"] = {"regex": self.structured_outputs_regex}
        named: dict[str, Any] = {
            "max_tokens": self.max_completion_length,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p or 0.0,
        }
        # As in TRL, generation_kwargs win over the fields of the same name.
        named |= {name: extra.pop(name) for name in list(extra) if name in named}
        return Sampling(**named, extra=extra)


class TrainerWeights:
    """The trainer's weights as :class:`~trl_offpolicy.engines.weights.WeightSource`.

    Args:
        engine: the engine that gathers them.
    """

    def __init__(self, engine: TRLEngine) -> None:
        self._engine = engine
        self.is_main = bool(engine.accelerator.is_main_process)

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors, with an adapter merged in. Every rank must iterate to the end."""
        named: Iterator[tuple[str, Tensor]] = self._engine._iter_named_params()
        return named

    def adapter(self) -> Adapter | None:
        """The LoRA adapter, if it is all that is trained; None otherwise."""
        return self._engine._sync.watch.adapter(ModelWeights(self._engine.model).adapter())


def _first_each(logps: Sequence[Sequence[Sequence[float | None]]]) -> list[list[float | None]]:
    """The log-prob of the sampled token, of each token of each row."""
    return [[token[0] for token in row] for row in logps]


def _reply(ids: list[int], logps: Any, tokens: Any, version: int) -> dict[str, Any]:
    """The fields of one reply, all of whose tokens ``version`` sampled."""
    return {
        "completion_ids": ids,
        "logprobs": logps,
        "token_ids": tokens,
        "logps": _first_each([logps])[0],
        "policy_versions": [version] * len(ids),
    }


@contextmanager
def trl_engine(
    engine: dict[str, Any] | None, *, folder: Path, rows: int | None = None, seed: int = 0, ahead: bool = False
) -> Iterator[None]:
    """While active, a GRPOTrainer that is built uses :class:`TRLEngine` with these settings and the run's seed."""
    settings = EngineSettings.parse(engine)
    build = partial(TRLEngine, settings=settings, folder=folder, rows=rows, seed=seed, ahead=ahead)
    with rebound(grpo_trainer, VLLMGeneration=build):
        yield
