"""Counters of speculative decoding: the share since the last reading, a restart, Prometheus' text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from trl_offpolicy.engines.drafts import (
    Drafted,
    Drafts,
    drafts_in_process,
    drafts_of_server,
    read_counters,
    with_counters,
)
from trl_offpolicy.engines.engine import EngineUnreachable
from trl_offpolicy.rollouts.sampler_stats import sampler_stats

METRICS = """# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m {x} 7"} 112.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 1.5e+02
vllm:spec_decode_num_draft_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 0.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 99.0
"""
SPECULATES = {"speculative_config": {"method": "ngram"}}


def test_prometheus_text_is_added_up_over_engines() -> None:
    assert read_counters(METRICS) == Drafted(262.0, 30.0)
    assert read_counters("") == Drafted(0, 0)


def test_the_share_is_that_since_the_last_reading() -> None:
    counts = iter([Drafted(900, 1), Drafted(910, 6), Drafted(930, 11), Drafted(930, 11), Drafted(8, 6)])
    engine = SimpleNamespace(drafts=Drafts(lambda: next(counts)))

    def found() -> dict[str, float]:
        return sampler_stats(engine, torch.device("cpu")).compute()

    assert found() == {"offpolicy/rollout/draft_taken_fraction": 0.5}
    assert found() == {"offpolicy/rollout/draft_taken_fraction": 0.25}
    assert found() == {}  # nothing was proposed
    assert found() == {"offpolicy/rollout/draft_taken_fraction": 0.75}  # the engine started anew


def refuse(path: str) -> str:
    raise EngineUnreachable(path)


def test_only_an_engine_that_speculates_is_asked() -> None:
    assert with_counters(SPECULATES)["disable_log_stats"] is False and with_counters({"seed": 1}) == {"seed": 1}
    assert with_counters({**SPECULATES, "disable_log_stats": True})["disable_log_stats"] is True  # the user's word
    assert drafts_in_process(None, {}) is None
    assert drafts_in_process(None, {**SPECULATES, "disable_log_stats": True}) is None
    assert drafts_of_server(None, {"speculative_config": None}) is None
    client: Any = SimpleNamespace(get=lambda path: METRICS if path == "/metrics" else "")
    drafts = drafts_of_server(client, SPECULATES)
    assert drafts is not None and drafts.since_last() == Drafted(0, 0)  # what it counted for a run before
    client.get = lambda path: METRICS.replace("112.0", "122.0").replace("} 30.0", "} 34.0")
    assert drafts.since_last() == Drafted(10.0, 4.0)
    client.get = refuse
    assert drafts.since_last() == Drafted(0, 0)
    named = "vllm:spec_decode_num_{}_tokens"
    counters = [SimpleNamespace(name=named.format("draft"), value=4), SimpleNamespace(name="other", values=[1])]
    here = drafts_in_process(SimpleNamespace(get_metrics=lambda: counters), with_counters(SPECULATES))
    assert here is not None and here.since_last() == Drafted(0, 0)  # a name that is missing: not known
    counters.append(SimpleNamespace(name=named.format("accepted"), value=1))
    assert here.since_last() == Drafted(4, 1)
