"""The field ``async_rollouts``: what it means, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trl import TrlParser

from trl_offpolicy.engines.engine import EngineError
from trl_offpolicy.rollouts.ahead.checks import (
    check_adapter,
    check_agents,
    check_server,
    check_snapshots,
    check_trainer,
)
from trl_offpolicy.rollouts.ahead.settings import AsyncSettings
from trl_offpolicy.trl.config import OffPolicyGRPOConfig

ON_SERVER = {"use_vllm": True, "vllm_mode": "server", "engine": {"transfer": "folder"}, "offpolicy": "paper/tis"}


@pytest.mark.parametrize(
    ("value", "lag", "cuts"),
    [
        (0, 0, False),
        (1, 1, False),
        ("2", 2, True),
        ({"lag": 1, "partial": "continue"}, 1, True),
        ({"lag": 3, "partial": "finish"}, 3, False),
        ({}, 1, False),
        (0.5, 0.5, False),
        ("1.5", 1.5, True),
        ({"lag": "1.5", "partial": "finish"}, 1.5, False),
    ],
)
def test_a_lag_or_a_mapping(value: Any, lag: int, cuts: bool) -> None:
    settings = AsyncSettings.parse(value)

    assert settings is not None
    assert (settings.lag, settings.cuts) == (lag, cuts)


def test_none_is_in_turn() -> None:
    assert AsyncSettings.parse(None) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, r"^async_rollouts\.lag must be a number >= 0, but got -1"),
        (float("nan"), r"^async_rollouts\.lag must be a number >= 0, but got nan"),
        ({"lag": True}, r"^async_rollouts\.lag must be a number >= 0, but got True"),
        (True, r"^async_rollouts must be a lag or a mapping, but got True"),
        ("soon", r"^async_rollouts must be a lag or a mapping, but got 'soon'"),
        (
            {"lags": 1},
            r"^async_rollouts must hold some of \['lag', 'partial', 'old_logps', 'ewma_decay'\], but got lags",
        ),
        (
            {"partial": "drop"},
            r"^async_rollouts\.partial must be one of \['continue', 'finish', 'keep'\], but got 'drop'",
        ),
        ({"old_logps": "guess"}, r"^async_rollouts\.old_logps must be one of .*, but got 'guess'"),
        ({"ewma_decay": 1.0}, r"^async_rollouts\.ewma_decay must be in \[0, 1\), but got 1\.0"),
    ],
)
def test_wrong_values(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AsyncSettings.parse(value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_vllm": False}, r"^async_rollouts must be left out with use_vllm False"),
        ({"vllm_mode": "colocate", "engine": None}, r"^async_rollouts must be left out with vllm_mode 'colocate'"),
        (
            {"engine": {"transfer": "nccl"}},
            r"^engine\.transfer must be auto, folder, adapter or broadcast with async_rollouts, but got 'nccl'",
        ),
        (
            {"async_rollouts": 2, "generation_kwargs": {"min_tokens": 3}},
            r"^async_rollouts\.partial must be 'finish' .* sampling options min_tokens",
        ),
        (
            {"async_rollouts": 2, "vllm_structured_outputs_regex": "a+"},
            r"^async_rollouts\.partial must be 'finish' .* vllm_structured_outputs_regex",
        ),
        (
            {"async_rollouts": {"lag": 2, "partial": "keep"}},
            r"^engine\.transfer must be adapter \(or auto\) with async_rollouts\.partial 'keep', but got 'folder'",
        ),
        (
            {
                "async_rollouts": {"partial": "keep"},
                "engine": {"transfer": "adapter", "weight_rounding": "int8"},
            },
            r"^engine\.weight_rounding must be left out with async_rollouts\.partial 'keep'",
        ),
        (
            {"async_rollouts": {"old_logps": "refuse"}},
            r"^async_rollouts\.old_logps must not be 'refuse' with TruncateWeight on old/sampling",
        ),
        (
            {"async_rollouts": {"old_logps": "refuse"}, "offpolicy": "measure"},
            r"^async_rollouts\.old_logps must not be 'refuse' with PPOClip in decoupled mode",
        ),
        (
            {
                "async_rollouts": {"old_logps": "ewma"},
                "offpolicy": {"preset": "paper/tis", "objective": {"proximal": "interpolated"}},
            },
            r"^async_rollouts\.old_logps must not be 'ewma' with objective\.proximal InterpolatedProximal",
        ),
    ],
)
def test_what_cannot_be_combined_is_said_at_once(
    make_args: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_args(**{"async_rollouts": 1, **ON_SERVER, **options})


@pytest.mark.parametrize(
    "options",
    [
        {
            "async_rollouts": {"old_logps": "refuse"},
            "offpolicy": {"preset": "measure", "objective": {"mode": "bypass"}},
        },
        {"async_rollouts": {"old_logps": "refuse", "lag": 0}},
        {"async_rollouts": 1, "generation_kwargs": {"min_tokens": 3}},
        {
            "async_rollouts": {"lag": 2, "partial": "keep"},
            "engine": {"transfer": "adapter"},
            "generation_kwargs": {"min_tokens": 3},
        },
        {"async_rollouts": 2, "generation_kwargs": {"repetition_penalty": 1.1, "ignore_eos": True}},
    ],
)
def test_what_can(make_args: Callable[..., Any], options: dict[str, Any]) -> None:
    make_args(**{**ON_SERVER, **options})


def test_a_server_must_load_adapters_to_keep_several(caplog: pytest.LogCaptureFixture) -> None:
    settings = AsyncSettings(lag=2, partial="keep")
    with pytest.raises(
        EngineError, match="loads no adapters, but got 'keep': start it with `trl-offpolicy serve --lora-rank N`"
    ):
        check_server(settings, SimpleNamespace(takes_adapter=False))

    with pytest.raises(EngineError, match="a vLLM server that has a KV connector"):
        check_server(settings, SimpleNamespace(takes_adapter=True, keeps_kv=True))

    check_server(settings, SimpleNamespace(takes_adapter=True, keeps_kv=False, most_adapters=3))
    assert not caplog.messages
    check_server(settings, SimpleNamespace(takes_adapter=True, keeps_kv=False, most_adapters=2))
    assert "with 2 adapters at a time, but with lag 2 there can be 3 versions" in caplog.text
    assert "--max-loras 3" in caplog.text


def test_what_keeps_several_needs_an_adapter_of_its_own() -> None:
    with pytest.raises(
        ValueError, match=r"^async_rollouts\.partial must be .* but got 'keep', which takes a PEFT model"
    ):
        check_adapter(AsyncSettings(lag=2, partial="keep"), has_adapter=False)
    check_adapter(AsyncSettings(lag=2, partial="keep"), has_adapter=True)
    check_adapter(AsyncSettings(lag=2, partial="continue"), has_adapter=False)


def test_a_second_model_is_refused_where_weights_are_sharded() -> None:
    for name in ("snapshot", "ewma"):
        check_snapshots(AsyncSettings(old_logps=name), strategy=None, sharding="FSDP")
    check_snapshots(AsyncSettings(old_logps="model"), strategy=None, sharding=None)
    with pytest.raises(ValueError, match=r"^async_rollouts\.old_logps must not be 'model' with FSDP: .* 'snapshot'"):
        check_snapshots(AsyncSettings(old_logps="model"), strategy=None, sharding="FSDP")


def test_ranks_that_sample_their_own_episodes_cannot_keep_adapters() -> None:
    with pytest.raises(ValueError, match=r"^async_rollouts\.partial must be .* on 2 ranks, but got 'keep'"):
        check_agents(AsyncSettings(partial="keep"), ranks=2)
    check_agents(AsyncSettings(partial="keep"), ranks=1)
    check_agents(AsyncSettings(partial="finish"), ranks=2)


@pytest.mark.parametrize("name", ["rollout_func", "rollout"])
def test_loops_of_the_user_are_refused(make_args: Callable[..., Any], name: str) -> None:
    args = make_args(**ON_SERVER, async_rollouts=1)

    with pytest.raises(
        ValueError, match=rf"^{name} must be left out with async_rollouts, but got \[<built-in function"
    ):
        check_trainer(args, {name: [print]})
    check_trainer(args, {name: None})
    check_trainer(make_args(**ON_SERVER), {name: [print]})


@pytest.mark.parametrize("name", ["tools", "environment_factory"])
def test_tools_of_the_trainers_thread_are_refused(make_args: Callable[..., Any], name: str) -> None:
    with pytest.raises(ValueError, match=r"^tool_timeout must be a number of seconds .*, but got None"):
        check_trainer(make_args(**ON_SERVER, async_rollouts=1, tool_timeout=None), {name: [print]})
    check_trainer(make_args(**ON_SERVER, async_rollouts=1, tool_timeout=5.0), {name: [print]})
    with pytest.raises(ValueError, match=r"^async_rollouts\.lag must be a whole number with tools .*, but got 1\.5"):
        check_trainer(make_args(**ON_SERVER, async_rollouts=1.5, tool_timeout=5.0), {name: [print]})
    check_trainer(make_args(**ON_SERVER, tool_timeout=None), {name: [print]})
    check_trainer(make_args(**ON_SERVER, async_rollouts=1, tool_timeout=None), {})


@pytest.mark.parametrize(("text", "lag"), [("1", 1), ('{"lag": 3, "partial": "finish"}', 3)])
def test_on_the_command_line(tmp_path: Path, text: str, lag: int) -> None:
    options = ["--use_vllm", "true", "--vllm_mode", "server", "--engine", '{"transfer": "folder"}', "--use_cpu", "true"]
    options += ["--bf16", "false", "--output_dir", str(tmp_path), "--async_rollouts", text]

    (args,) = TrlParser((OffPolicyGRPOConfig,)).parse_args_and_config(options)

    settings = AsyncSettings.parse(args.async_rollouts)
    assert settings is not None and settings.lag == lag
