"""The dtype ladder: its roundings, its engines, what it measures, its entry point."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.dtype_ladder import llm
from benchmarks.dtype_ladder.experiment import Job, Settings, compare, run, score, warm_model
from benchmarks.dtype_ladder.figure import draw
from benchmarks.dtype_ladder.formats import FORMATS, WHERE, engine
from benchmarks.dtype_ladder.results import lines, ratios, read, write
from benchmarks.dtype_ladder.tables import report
from benchmarks.frontier.walk import Walker, sample
from benchmarks.lab.jobs import Experiment, run_all
from benchmarks.lab.sorting import prompts, token_logps

ROOT = Path(__file__).resolve().parents[2]
TINY = Settings(longest=16, answers=8, warm_steps=3, settle_steps=1)
DIGITS = {"tf32": 11, "fp16": 11, "bf16": 8, "fp8 e4m3": 4, "fp8 e5m2": 3}


@pytest.fixture(scope="module")
def model() -> Walker:
    torch.manual_seed(0)
    return Walker(20).requires_grad_(False)


@pytest.fixture(scope="module")
def ids(model: Walker) -> Tensor:
    chance = torch.Generator().manual_seed(1)
    return sample(model, prompts(6, chance), 12, torch.rand(6, 12, generator=chance)).ids


@pytest.mark.parametrize("name", list(FORMATS))
def test_rounding_is_as_fine_as_the_format(name: str) -> None:
    form = FORMATS[name]
    x = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0))
    rounded = form(x)
    torch.testing.assert_close(form(rounded), rounded, atol=1e-6, rtol=1e-6)  # a rounded number stays
    error = (rounded - x).abs()
    if name == "fp32":
        assert not error.any()
    elif name in DIGITS:
        normal = x.abs() > 0.01  # relative error of at most half a unit in the last of the digits
        largest = float((error / x.abs())[normal].max())
        assert 0.5 * 2.0 ** -DIGITS[name] < largest <= 1.01 * 2.0 ** -DIGITS[name]
    else:
        step = x.abs().amax(-1, keepdim=True) / (2 ** (int(name[3:]) - 1) - 1)
        assert 0.4 < float((error / step).max()) <= 0.5001


def test_each_part_is_rounded_where_it_says(model: Walker, ids: Tensor) -> None:
    exact = model.logits(ids)
    for where in WHERE:
        assert torch.equal(engine(model, FORMATS["fp32"], where).logits(ids), exact)
        assert not torch.allclose(engine(model, FORMATS["int4"], where).logits(ids), exact, atol=1e-3)
    assert torch.equal(model.logits(ids), exact)  # the model itself is left alone
    weights = engine(model, FORMATS["int8"], "weights")
    assert torch.equal(weights.head.weight, FORMATS["int8"](model.head.weight))
    assert torch.equal(weights.tokens.weight, model.tokens.weight)
    cache = engine(model, FORMATS["int8"], "kv")
    assert torch.equal(cache.head.weight, model.head.weight)
    with pytest.raises(ValueError, match="where must be one of"):
        engine(model, FORMATS["int8"], "everything")  # type: ignore[arg-type]


def test_keys_and_values_are_rounded_by_head_and_queries_are_not(model: Walker, ids: Tensor) -> None:
    seen: list[Tensor] = []
    for one in (model, engine(model, FORMATS["int8"], "kv")):
        handle = one.blocks[0].qkv.register_forward_hook(lambda _m, _a, out: seen.append(out))
        one.logits(ids)
        handle.remove()
    exact, rounded = seen
    q, k, v = exact.chunk(3, -1)
    by_head = [FORMATS["int8"](part.unflatten(-1, (4, 16))).flatten(-2) for part in (k, v)]
    assert torch.equal(rounded, torch.cat([q, *by_head], dim=-1))


def test_sixteen_bit_activations_are_rounded_between_the_blocks(model: Walker, ids: Tensor) -> None:
    copy = engine(model, FORMATS["bf16"], "activations")
    seen: list[Tensor] = []
    copy.norm.register_forward_hook(lambda _m, args, _out: seen.append(args[0]))
    logits = copy.logits(ids)
    for x in (seen[0], logits):
        assert torch.equal(x, x.bfloat16().float())


@pytest.mark.parametrize("where", WHERE)
def test_what_is_sampled_is_what_the_engine_scores(model: Walker, where: str) -> None:
    sampler = engine(model, FORMATS["fp8 e4m3"], where)  # type: ignore[arg-type]
    chance = torch.Generator().manual_seed(2)
    answers = sample(sampler, prompts(4, chance), 10, torch.rand(4, 10, generator=chance))
    own, same = score(sampler.logits, sampler.logits, answers.ids)
    torch.testing.assert_close(answers.logps, own, atol=2e-3, rtol=2e-3)  # a float32 digit can tip a rounding
    assert same.all()
    scores, _ = score(model.logits, sampler.logits, answers.ids)
    torch.testing.assert_close(scores, token_logps(model, answers.ids), atol=1e-5, rtol=1e-5)
    assert float((scores - own).abs().max()) > 1e-2


def test_what_is_compared() -> None:
    sampling = torch.tensor([[-1.0, -2.0], [-0.5, -1.0]])
    shift = torch.tensor([[0.2, 0.0], [0.0, -0.1]])
    same = torch.tensor([[True, False], [True, True]])
    found = compare(sampling + shift, sampling, same)
    ratio = shift.exp()
    assert found["kl_k3"] == pytest.approx(float((ratio - 1 - shift).mean()), rel=1e-4)
    assert found["chi2_token"] == pytest.approx(float((ratio**2).mean() - 1), rel=1e-4)
    whole = shift.sum(1).exp()
    assert found["ess_sequence"] == pytest.approx(float(whole.mean() ** 2 / (whole**2).mean()), rel=1e-4)
    assert found["ess_token"] == pytest.approx(float(ratio.mean() ** 2 / (ratio**2).mean()), rel=1e-4)
    assert found["flips"] == 0.25


def test_a_tiny_ladder_is_ordered_and_reported(tmp_path: Path) -> None:
    jobs = [Job(form, where, 0) for form in ("fp32", "fp16", "bf16", "int4") for where in ("weights", "all")]
    outcomes = run_all(jobs, TINY, tmp_path, 1, Experiment(warm_model, run))  # type: ignore[arg-type]
    found = lines(outcomes, "walk")
    kl = {row["format"]: row["kl_k3"] for row in found if row["where"] == "all"}
    assert kl["fp32"] < 1e-9 < kl["fp16"] < kl["bf16"] / 8 < kl["int4"] / 64
    more = ratios(found)
    fine, rough = ([row["kl_k3"] for row in found if row["format"] == form] for form in ("fp16", "bf16"))
    assert [row["kl_ratio"] for row in more] == pytest.approx([b / a for a, b in zip(fine, rough, strict=True)])
    write(tmp_path / "results.jsonl", {"line": "run"}, [*found, *more])
    rows = read(tmp_path / "results.jsonl")
    ElementTree.fromstring(draw(rows))
    assert "| int4 | all |" in report(rows) and "KL(bf16) / KL(fp16)" in report(rows)
    assert set(pd.read_json(tmp_path / "results.jsonl", lines=True).line) == {"run", "mismatch", "bf16 over fp16"}


def test_a_llama_is_sampled_scored_and_rounded() -> None:
    model = tiny_model("llama", seed=0, max_position_embeddings=64).eval().requires_grad_(False)
    chance = torch.Generator().manual_seed(0)
    questions = torch.randint(2, 60, (4, llm.PROMPT_TOKENS), generator=chance)
    uniforms = torch.rand(4, 6, generator=chance)
    ids, sampling, likeliest = llm.sample(model, questions, uniforms)
    scores, expected = llm.score(model, ids)
    torch.testing.assert_close(scores, sampling, atol=1e-4, rtol=1e-4)
    assert torch.equal(likeliest, expected)
    for where in WHERE:
        rounded = engine(model, FORMATS["int4"], where)
        assert float((llm.score(rounded, ids)[0] - scores).abs().max()) > 1e-3
        assert torch.equal(engine(model, FORMATS["fp32"], where)(ids).logits, model(ids).logits)
    assert len(llm.plan()) == len(FORMATS) + 4


@pytest.mark.slow
def test_the_short_run(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/dtype_ladder/run.py", "--short", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "| int4 | weights |" in done.stdout and (tmp_path / "ladder.svg").exists()
    frame = pd.read_json(tmp_path / "results.jsonl", lines=True)
    kl = frame[(frame["length"] == 64) & (frame["where"] == "all")].set_index("format").kl_k3
    assert kl["fp32"] < 1e-9 and 16 < kl["bf16"] / kl["fp16"] < 256 and kl["int4"] > 10 * kl["int8"]
