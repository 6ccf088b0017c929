"""The faults, each in several strengths: thunks that make cases, so that finished ones cost nothing.

The two smallest strengths of a fault that can be made small aim at 3 and 30 times the noise floor. How large a fault
is, is always measured on the case itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from math import log2, sqrt
from typing import Any

import numpy as np
from cases import Case
from moe import rough_router
from policies import Policy, dropped
from tasks import Task
from worlds import Batch, World, sample_from, some_rows, with_logps

from trl_offpolicy.diagnosis.attribution.features import kl_k3
from trl_offpolicy.diagnosis.attribution.precision import rounded_activations, rounded_weights, simulated_dtype
from trl_offpolicy.diagnosis.thresholds import SAME_POLICY_KL
from trl_offpolicy.engines.hf import Head
from trl_offpolicy.functional.truncated_sampling import Truncation

Clean = Callable[[], tuple[Batch, dict[str, Any]]]
Thunk = tuple[str, Callable[[], list[Case]]]
TARGETS = (3.0, 30.0)
"""Times the noise floor, of strengths 0 and 1."""
TEMPERATURES = ((2, 0.98), (3, 0.9))
TRUNCATIONS = (
    (2, Truncation(top_p=0.99)), (3, Truncation(top_p=0.8)), (3, Truncation(top_k=10)), (3, Truncation(min_p=0.1))
)  # fmt: skip
SHARES = ((0, "one row"), (1, "a quarter of the rows"), (2, "all rows"))


def cached_clean(world: World) -> Clean:
    """The clean batch and its scores, made when first asked for."""

    @cache
    def clean() -> tuple[Batch, dict[str, Any]]:
        batch = world.sample()
        return batch, world.score(batch)

    return clean


def floor_of(clean: Clean) -> float:
    """KL k3 of the clean batch, but at least what is called the same policy everywhere in this kit."""
    batch, scored = clean()
    return max(SAME_POLICY_KL, kl_k3(scored["old_per_token_logps"] - batch.logps))


def clean_case(world: World, clean: Clean) -> list[Case]:
    return [world.case("none", "clean", 0, clean()[0], scored=clean()[1])]


def shared_faults(world: World, clean: Clean) -> Iterator[Thunk]:
    """Faults that need no second set of weights."""
    yield "clean", partial(clean_case, world, clean)
    yield "temperature", partial(temperature_faults, world, clean)
    yield "truncation", partial(truncation_faults, world, clean)
    yield "precision", partial(precision_faults, world, clean)
    yield "bookkeeping", partial(bookkeeping_faults, world, clean)


def temperature_faults(world: World, clean: Clean) -> list[Case]:
    """The engine divides its logits by a number that the trainer does not know of."""
    _, scored = clean()
    spread = np.nanmean((scored["old_per_token_logps"] + scored["entropies"]) ** 2)
    small = [(n, 1 + sqrt(2 * times * floor_of(clean) / spread)) for n, times in enumerate(TARGETS)]
    return [
        world.case("temperature", f"temperature {value:.7g}", strength, world.sample(Head(value), salt=strength + 1),
                   engine={"temperature": value})
        for strength, value in (*small, *TEMPERATURES)
    ]  # fmt: skip


def truncation_faults(world: World, clean: Clean) -> list[Case]:
    """The engine samples from a part of the distribution and reports log-probs of that part."""
    small = [(n, Truncation(top_p=1 - sqrt(8 * times * floor_of(clean)))) for n, times in enumerate(TARGETS)]
    found = []
    for strength, cut in (*small, *TRUNCATIONS):
        options = {"top_p": cut.top_p, "top_k": cut.top_k, "min_p": cut.min_p}
        fault = ", ".join(f"{k} {v:.7g}" for k, v in options.items() if v != getattr(Truncation(), k))
        batch = world.sample(Head(1.0, cut), salt=10 + strength)
        found.append(world.case("truncated_sampling", fault, strength, batch, engine=options))
    return found


def precision_faults(world: World, clean: Clean) -> list[Case]:
    """The engine computes in fewer digits, or its weights are rounded."""

    mixture = world.declared.get("experts")

    def one(strength: int, fault: str, inside: Any, **sides: str) -> Case:
        cause = "precision and routing" if mixture and strength == 3 else "precision"  # rough enough to flip experts
        return world.case(cause, fault, strength, world.sample(inside=inside, salt=20 + strength), engine=sides)

    model = world.model
    found = [
        one(2, "fp16", simulated_dtype(model, "fp16"), dtype="float16"),
        one(3, "bf16", simulated_dtype(model, "bf16"), dtype="bfloat16"),
        one(3, "int8 weights", rounded_weights(model, "int8"), quantization="int8"),
        one(3, "fp8 weights", rounded_weights(model, "fp8"), quantization="fp8"),
    ]
    size = size_of(found[0])  # 11 digits; each digit more is a quarter of it
    for strength, times in enumerate(TARGETS):
        bits = min(23, round(11 + log2(size / (times * floor_of(clean))) / 2))
        inside = rounded_activations(model, bits)
        found.append(one(strength, f"{bits}-bit activations", inside, dtype="reduced"))
    return found


def size_of(case: Case) -> float:
    """KL k3 of a case."""
    evidence = case.evidence
    return kl_k3((evidence.old_per_token_logps - evidence.sampling_per_token_logps)[evidence.observed])


def bookkeeping_faults(world: World, clean: Clean) -> list[Case]:
    """Off by one, and two faults that no cause stands for: they cost no forward."""
    batch, scored = clean()
    found = []
    for step in (1, -1):
        shifted = np.roll(batch.logps, step, axis=1)
        shifted[:, 0 if step == 1 else -1] = np.nan
        for strength, share in SHARES:
            rows = _rows(strength, len(batch.ids))
            logps = batch.logps.copy()
            logps[rows] = shifted[rows]
            fault = f"off by {step:+d}, {share}"
            found.append(world.case("misalignment", fault, strength, with_logps(batch, logps), scored=scored))
    bits = with_logps(batch, batch.logps / np.log(2))
    cut = with_logps(batch, np.maximum(batch.logps, -3.0))
    found.append(world.case("unknown", "log-probs in bits", 3, bits, scored=scored))
    found.append(world.case("unknown", "log-probs clipped at -3", 3, cut, scored=scored))
    return found


def _rows(strength: int, count: int) -> list[int]:
    return list(range(0, count, (count, 4, 1)[strength]))


def adapter_faults(world: World, policy: Policy, versions: list[Any], other: Any, clean: Clean) -> Iterator[Thunk]:
    """Weights that are not the trainer's. The trainer holds the last version."""
    last = len(versions)
    held = [None, *versions]
    same = {"adapter": "policy", "weight_version": last}

    @contextmanager
    def weights(beside: Any, share: float) -> Iterator[None]:
        policy.set_weights(held[last], beside, share)
        try:
            yield
        finally:
            policy.set_weights(held[last])

    def stale(strength: int, fault: str, version: int, share: float) -> list[Case]:
        batch = world.sample(inside=weights(held[version], share), salt=40 + strength)
        scored = world.score(batch)
        lag = {"engine": {**same, "weight_version": version}, "trainer": same}
        cases = [
            world.case("stale_weights", fault, strength, batch, scored=scored, engine=same, trainer=same),
            world.case("policy_staleness", fault, strength, batch, scored=scored, **lag),
        ]
        if version == 0 and share == 1.0:
            sides = {"engine": {**same, "adapter": "none"}, "trainer": same}
            cases.append(world.case("wrong_adapter", "no adapter", strength, batch, scored=scored, **sides))
        return cases

    def all_stale() -> list[Case]:
        found = stale(2, "lag 1", last - 1, 1.0)
        size = size_of(found[0])
        for strength, times in enumerate(TARGETS):
            share = sqrt(times * floor_of(clean) / size)
            found += stale(strength, f"{share:.2g} of an update", last - 1, share)
        return found + stale(3, f"lag {last}", 0, 1.0)

    def wrong(strength: int, fault: str, share: float) -> Case:
        batch = world.sample(inside=weights(other, share), salt=50 + strength)
        sides = {"engine": {**same, "adapter": "other"}, "trainer": same}
        return world.case("wrong_adapter", fault, strength, batch, **sides)

    def all_wrong() -> list[Case]:
        found = [wrong(3, "another adapter", 1.0)]
        for strength, times in enumerate(TARGETS):
            share = sqrt(times * floor_of(clean) / size_of(found[0]))
            found.append(wrong(strength, f"{share:.2g} of another adapter", share))
        return found

    yield "stale", all_stale
    yield "wrong adapter", all_wrong


def trainer_faults(
    world: World, policy: Policy, task: Task, questions: list[str], delta: Any, clean: Clean
) -> Iterator[Thunk]:
    """Faults of the scoring side; the samples are the clean ones."""

    def dropout(strength: int, fault: str, **shares: float) -> Case:
        batch, _ = clean()
        scored = world.score(batch, inside=dropped(policy, delta=delta, **shares))
        sides = {"trainer": {"dropout": max(shares.values())}}
        return world.case("dropout", fault, strength, batch, scored=scored, **sides)

    def dropouts() -> list[Case]:
        found = [dropout(2, "adapter dropout 0.1", adapter=0.1), dropout(3, "attention dropout 0.1", attention=0.1)]
        for strength, times in enumerate(TARGETS):
            share = 0.1 * times * floor_of(clean) / size_of(found[0])
            found.append(dropout(strength, f"adapter dropout {share:.1g}", adapter=share))
        return found

    def prompts(strength: int, fault: str, render: Callable[[str], list[int]]) -> list[Case]:
        batch, _ = clean()
        seen = [render(question) for question in questions for _ in range(len(batch.ids) // len(questions))]
        scored = world.score(batch, prompt_ids=seen)
        return [world.case("prompt_difference", fault, strength, batch, scored=scored, trainer={"prompt_hash": "q"})]

    def retokenised() -> list[Case]:
        batch, scored = clean()
        bad = world.score(batch, ids=[split_token(task.tokenizer, ids, n) for n, ids in enumerate(batch.ids)])
        return [
            world.case("misalignment", f"retokenised, {share}", strength, batch,
                       scored=some_rows(scored, bad, _rows(strength, len(batch.ids))))
            for strength, share in SHARES
        ]  # fmt: skip

    yield "dropout", dropouts
    yield "trailing space", partial(prompts, 1, "trailing space", lambda q: task.render(q + " "))
    yield "other system prompt", partial(prompts, 2, "no system prompt", lambda q: task.render(q, system=None))
    yield "no template", partial(prompts, 3, "no chat template", lambda q: task.render(q, template=False))
    yield "retokenised", retokenised
    yield "tool tokens", partial(tool_tokens, world, task, clean)


def split_token(tokenizer: Any, ids: list[int], row: int) -> list[int]:
    """The same text in other tokens: one token of the first half is written as two."""
    start = row % max(1, len(ids) // 2)
    for place in [*range(start, len(ids)), *range(start)]:
        text = tokenizer.convert_ids_to_tokens(ids[place])
        for cut in range(1, len(text)):
            pieces = [tokenizer.get_vocab().get(part) for part in (text[:cut], text[cut:])]
            if None not in pieces:
                return [*ids[:place], *pieces, *ids[place + 1 :]]
    return ids


def tool_tokens(world: World, task: Task, clean: Clean) -> list[Case]:
    """Output of a tool in the middle of completions, trained on as if it had been sampled; its log-prob reads 0."""
    batch, _ = clean()
    tool = list(task.tokenizer(" [calculator: 42.0] ")["input_ids"])
    half = 8
    prefixes = [ids[:half] for ids in batch.ids]
    prompts = [p + c + tool for p, c in zip(batch.prompt_ids, prefixes, strict=True)]
    width = batch.logps.shape[1]
    rest = sample_from(world, prompts, max(1, width - half - len(tool)), salt=60)
    found = []
    for strength, share in SHARES:
        ids, logps = [list(i) for i in batch.ids], batch.logps.copy()
        for row in _rows(strength, len(batch.ids)):
            if len(batch.ids[row]) < half:
                continue
            ids[row] = (prefixes[row] + tool + rest.ids[row])[:width]
            after = rest.logps[row][: len(rest.ids[row])]
            values = [*batch.logps[row, :half], *[0.0] * len(tool), *after][:width]
            logps[row] = np.nan
            logps[row, : len(values)] = values
        sides = {"engine": {"tools": True}, "trainer": {"tools": True}}
        mixed = Batch(batch.prompt_ids, ids, logps)
        found.append(world.case("tool_tokens", f"tool output, {share}", strength, mixed, **sides))
    return found


def routing_faults(world: World) -> list[Case]:
    """Routers in fewer digits than the trainer's. Where no token goes to another expert, the case is a clean one."""
    found = []
    for strength, bits, only in (
        (0, 12, True),
        (1, 10, True),
        (2, 8, True),
        (2, 8, False),
        (3, 6, True),
        (3, 6, False),
    ):
        fault = f"router {bits} bits{', choice only' if only else ''}"
        batch = world.sample(inside=rough_router(world.model, bits, select_only=only), salt=70 + bits)
        found.append(world.case("routing", fault, strength, batch))
    return found
