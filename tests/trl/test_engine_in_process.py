"""The TRL trainer's engine where only a GPU goes: memory that sleeps, weights that vLLM changes, TRL's own transfers.

vLLM's part is a stand-in that keeps its rules: what sleeps cannot be used, and a request before all is awake waits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from trl.generation import vllm_generation

from trl_offpolicy.engines.settings import EngineSettings
from trl_offpolicy.engines.sync import WeightSync
from trl_offpolicy.engines.weights.changed import ChangedWeights
from trl_offpolicy.trl import engine as trl_engines
from trl_offpolicy.trl.checks import check_sleep
from trl_offpolicy.trl.engine import TRLEngine
from trl_offpolicy.trl.in_process import changes_after_loading, copied
from trl_offpolicy.trl.keyed_client import KeyedClient

KEY = "topsecret"


class Asleep(RuntimeError):
    """What a real engine does not say: it reads memory that is not there, or runs its loop for ever."""


class SleepingLLM:
    """vLLM's ``LLM`` on a GPU, as far as its sleep goes. Written after its executor's and core's ``wake_up``."""

    def __init__(self, **config: Any) -> None:
        self.asleep: set[str] = set()
        self.paused, self.scored, self.log = False, 0, []
        settings = {"quantization": None, "use_mla": False, "dtype": torch.float32, **config}
        experts = settings.pop("experts", 0)
        model_config = SimpleNamespace(get_num_experts=lambda: experts, max_model_len=64, **settings)
        model = SimpleNamespace(load_weights=self._load)
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(model_config=model_config),
            model_executor=SimpleNamespace(sleeping_tags=self.asleep, driver_worker=worker),
        )

    def sleep(self, level: int = 1) -> None:
        assert level == 2
        self.asleep |= {"weights", "kv_cache"}
        self.paused = True
        self.log.append("sleep")

    def wake_up(self, tags: list[str] | None = None) -> None:
        if not self.asleep or not set(tags or ()) <= self.asleep:
            self.log.append(f"vLLM warns: {tags} not asleep")
        else:
            self.log.append(f"wake {tags}")
            self.asleep -= set(tags or self.asleep)
        self.paused = bool(self.asleep)

    def _load(self, weights: list[tuple[str, Any]]) -> None:
        if "weights" in self.asleep:
            raise Asleep("weights")
        self.log.append("load")

    def reset_prefix_cache(self, **_: Any) -> bool:
        return True

    def generate(self, prompts: list[Any], *_: Any, **__: Any) -> list[Any]:
        if self.paused:
            raise Asleep("the scheduler: this request waits for ever")
        self.scored += 1
        rows = [prompt["prompt_token_ids"] for prompt in prompts]
        places = [[None, *({token: SimpleNamespace(logprob=-1.0)} for token in row[1:])] for row in rows]
        return [SimpleNamespace(prompt_logprobs=row, prompt_token_ids=[], outputs=[]) for row in places]

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(name_or_path="", vocab_size=1)

    def collective_rpc(self, question: Any, kwargs: Any) -> list[Any]:
        if "weights" in self.asleep:
            raise Asleep("the rope's buffer")
        return [{"settings": {"answered": True}}]


def made(llm: Any, *, sleep: bool = False, device: str = "cuda", monkeypatch: pytest.MonkeyPatch, **engine: Any) -> Any:
    """The engine of a trainer on a GPU, built by the kit's own start with TRL's end of it."""

    def init(self: Any) -> None:
        self.llm, self._llm_weights_sleeping = llm, self.enable_sleep_mode
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)

    monkeypatch.setattr(vllm_generation.VLLMGeneration, "_init_vllm", init)
    monkeypatch.setattr(vllm_generation, "empty_cache", lambda: None)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setattr(trl_engines, "interview_llm", lambda llm, **_: SimpleNamespace(facts=lambda: read(llm)))
    self: Any = TRLEngine.__new__(TRLEngine)
    self.mode, self.tensor_parallel_size, self.enable_sleep_mode = "colocate", 1, sleep
    self.model, self.processing_class = tiny_model(), None
    self.settings, self._run_seed, self._rows = EngineSettings.parse(engine), 1, None
    self.accelerator = SimpleNamespace(
        process_index=0, num_processes=1, device=torch.device(device), is_main_process=True,
        wait_for_everyone=lambda: None,
    )  # fmt: skip
    self._dist = SimpleNamespace(is_fsdp=False, fsdp_version=0)
    self._on_server, self._server, self._adapters, self._weight_metadata = False, None, None, None
    self._changed, self._sync, self._step = ChangedWeights(), WeightSync(), lambda: 3
    self._log, self.calls = lambda report: None, []
    for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
        setattr(self, name, 1.0 if name != "min_p" else 0.0)
    self.top_k, self.max_completion_length, self.logprobs, self.generation_kwargs = 0, 4, 0, {}
    self.structured_outputs_regex = None
    self._start_in_process()
    return self


def read(llm: Any) -> Any:
    return llm.collective_rpc(None, kwargs={})


def test_an_engine_that_sleeps_is_asked_proved_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of a run: built, asked for run.json, synced and proved, sampled from by TRL, synced again."""
    llm = SleepingLLM()
    engine = made(llm, sleep=True, monkeypatch=monkeypatch)
    assert engine.interview().facts()[0]["settings"]["answered"]
    engine._sync = WeightSync([[1, 2, 3]], lambda ids: [[-1.0, -1.0]])
    for generation in range(2):
        engine.sync_weights()
        assert engine.last_sync.agreement == 1.0 and not llm.asleep
        engine.generate([[3]], None, 1)
        assert llm.asleep == {"weights", "kv_cache"}, generation
    engine.generate([[3]], None, 1)  # as in an evaluation: TRL sends the weights again by itself
    assert llm.scored == 6 and llm.log.count("sleep") == 4


def test_no_call_reaches_vllm_that_it_warns_of(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = SleepingLLM()
    engine = made(llm, sleep=True, monkeypatch=monkeypatch)
    engine._sync = WeightSync([[1, 2, 3]], lambda ids: [[-1.0, -1.0]])
    engine.interview()
    engine.sync_weights()
    engine.sync_weights()
    engine.generate([[3]], None, 1)
    assert not [line for line in llm.log if "warns" in line]


def test_the_engine_starts_at_a_port_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made(SleepingLLM(), monkeypatch=monkeypatch)
    assert int(os.environ["MASTER_PORT"]) != 29500  # TRL's first choice, and that of a run beside this one


def test_an_adapter_alone_is_refused_with_sleep_mode() -> None:
    args = SimpleNamespace(engine={"transfer": "adapter"}, use_vllm=True, vllm_mode="colocate")
    args.vllm_enable_sleep_mode = True
    with pytest.raises(ValueError, match=r"engine\.transfer must be auto or memory with vllm_enable_sleep_mode: true"):
        check_sleep(args)
    for name, value in (("vllm_enable_sleep_mode", False), ("engine", {"transfer": "memory"}), ("vllm_mode", "server")):
        check_sleep(SimpleNamespace(**{**vars(args), name: value}))


def test_ranks_whose_engines_sleep_ask_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(SleepingLLM(), sleep=True, monkeypatch=monkeypatch)._together
    assert not made(SleepingLLM(), monkeypatch=monkeypatch)._together


# ------------------------------------------------------------------------------- what vLLM changes after it has loaded


@pytest.mark.parametrize(
    ("config", "reloads"),
    [
        ({}, False),
        ({"experts": 8}, True),
        ({"use_mla": True}, True),
        ({"quantization": "fp8"}, True),
        ({"quantization": "bitsandbytes"}, False),
    ],
)
@pytest.mark.parametrize("sleep", [False, True])
def test_weights_that_vllm_changes_are_processed_at_each_sync(
    config: dict[str, Any], reloads: bool, sleep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, seen = SleepingLLM(**config), []

    def reload(target: Any, named: Any, *, part: bool) -> int:
        assert "weights" not in llm.asleep
        seen.append((part, {name: tensor.clone() for name, tensor in named}))
        return 17

    monkeypatch.setattr(trl_engines, "reload_in_process", reload)
    engine = made(llm, sleep=sleep, monkeypatch=monkeypatch)
    assert changes_after_loading(llm) is reloads
    for _ in range(3):
        engine.sync_weights()
        engine.confirm(True)  # also after a proof everything is sent
    assert llm.log.count("load") == (0 if reloads else 3 * len(dict(engine.model.named_parameters())))
    assert [part for part, _ in seen] == [False] * (3 if reloads else 0)
    for _, named in seen:
        assert named.keys() == dict(engine.model.named_parameters()).keys()
    if sleep:
        assert not engine._llm_weights_sleeping
    if reloads:
        assert engine.last_sync.bytes == 17 and engine.last_sync.kind == "memory"


def test_a_weight_that_is_freed_behind_it_arrives_whole() -> None:
    """A reload keeps the weights of a layer until it has them all, and FSDP1 frees each at the next."""

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(3):
            tensor = torch.full((4,), float(index))
            yield str(index), tensor
            tensor.fill_(-1)

    assert [tensor.tolist() for _, tensor in list(copied(gathered()))] == [[0.0] * 4, [1.0] * 4, [2.0] * 4]


def test_the_bytes_of_trls_own_transfers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made(SleepingLLM(), monkeypatch=monkeypatch)
    size = sum(weight.nbytes for weight in engine.model.parameters())
    engine.sync_weights()
    assert engine.last_sync.bytes == size and engine.last_sync.metrics()["sync_bytes"] == size
    # TRL's client walks the weights twice before its first sync: once for names and shapes
    engine.mode, passes = "server", []
    engine.vllm_client = SimpleNamespace(
        update_named_params=lambda metadata, named: passes.append((len(metadata), len(list(named)))),
        reset_prefix_cache=lambda: None,
    )
    for _ in range(2):
        engine.sync_weights()
        assert engine.last_sync.bytes == size and engine.last_sync.kind == "nccl"
    assert passes == [(len(list(engine.model.parameters())),) * 2] * 2


# ------------------------------------------------------------------------------------------- a server that wants a key


class Guarded(BaseHTTPRequestHandler):
    """A server behind the kit's guard: 401 without the key, except on /health."""

    def do_GET(self) -> None:
        allowed = self.path == "/health" or self.headers.get("Authorization") == f"Bearer {KEY}"
        body = b'{"data": [{"id": "policy"}]}'
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def guarded() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Guarded)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_trls_client_sends_the_key(guarded: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Also where ``~/.netrc`` has a password for the machine, which replaces a header of requests' session."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password mine\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(vllm_generation.VLLMClient, "init_communicator", lambda self, device: None)
    engine: Any = TRLEngine.__new__(TRLEngine)
    engine.mode, engine.server_base_url, engine.server_timeout, engine.group_port = "server", guarded, 5.0, 51216
    engine.settings, engine._asks_ahead, engine.processing_class = EngineSettings(transfer="nccl"), False, None
    engine.top_p, engine.top_k, engine.min_p, engine.generation_kwargs = 1.0, 0, 0.0, {}
    engine.model = SimpleNamespace()
    engine.accelerator = SimpleNamespace(
        device=torch.device("cuda"), is_main_process=True, wait_for_everyone=lambda: None
    )
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    engine._init_vllm()
    assert isinstance(engine.vllm_client, KeyedClient) and engine.vllm_client.model == "policy"
    assert vllm_generation.VLLMClient is not KeyedClient  # others are left alone
    for key in ("", "wrong"):
        monkeypatch.setenv("VLLM_API_KEY", key)
        with pytest.raises(Exception, match="Request failed: 401"):
            engine._init_vllm()
