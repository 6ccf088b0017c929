"""What else leaves the same evidence, and what speaks against a cause: only what excludes the others is a name.

Some faults look alike in log-probs, and a declared difference may be there without being the fault. So every cause that
is named from such evidence is first held against what it would have to show. What does not show it is no longer named,
but stays the closest guess. What cannot be excluded is told beside the name, with the test that decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trl_offpolicy.diagnosis.attribution.evidence import TokenEvidence, compression, excluded
from trl_offpolicy.diagnosis.attribution.traces.features import Features
from trl_offpolicy.diagnosis.attribution.traces.signatures import Limits
from trl_offpolicy.diagnosis.attribution.trials.shares import left_share
from trl_offpolicy.diagnosis.causes import CAUSES

LARGEST_ROUNDING: Mapping[str, float] = {
    "float16": 2e-3, "fp16": 2e-3, "half": 2e-3, "bfloat16": 0.02, "bf16": 0.02, "int8": 0.1, "fp8": 0.1, "int4": 1.0,
}  # fmt: skip
"""Largest KL k3 that a format explains, nats per token: bf16 has 3 bits less than fp16 (up to 64 times)."""
LARGEST_OTHER = 1.0
"""The same for formats that are not listed."""
WITH_EXPERTS = 4.0
"""Times that with a mixture of experts, where rounding sends some tokens to other experts."""
LATE = 0.05
"""First tokens over all, below which other weights are not it: they change a token wherever it stands."""
LEAN, EARLY, BY_TOKEN = 0.3, 4.0, 0.5
"""|mean| / root mean square of d, first tokens over all, and correlation of equal tokens, from which on differences are
not rounding. The last one is a sign of other weights. A mean of -KL beside a root mean square of sqrt(2 KL) is no
direction: every noise has it."""
EXACT_FIRST, EXACT_ROWS = 1e-3, 0.2
"""First tokens over all, below which they agree; share of rows that agree at every token, from which on some do."""
SHARPER, MOSTLY_SHARPER = 0.3, 0.5
"""R^2 of a temperature from which on differences are not rounding (bf16 alone gives 0.003), and not an update."""
LEAST_ROUNDING = 5000.0
"""The largest KL of a format over the least that it leaves."""
UNLIKE = 0.97
"""Share of the mismatch that the best simulated rounding leaves, above which it is no rounding."""
AT_THE_END = 0.5
"""Share of the zeros in runs to the end of their row, above which log-probs were filled up and no tool answered."""
LARGEST_STEP = 0.05
"""KL k3 in nats per token that an update of the weights explains; two explain four times that."""


@dataclass(frozen=True)
class LookAlikes:
    """Causes that leave the same evidence.

    Args:
        causes: names in :data:`~trl_offpolicy.diagnosis.causes.CAUSES`.
        test: the one test that tells them apart.
    """

    causes: tuple[str, ...]
    test: str

    @property
    def text(self) -> str:
        """Both in words."""
        names = " or ".join(CAUSES[one].title if one in CAUSES else one.replace("_", " ") for one in self.causes)
        return f"Not ruled out: {names}. {self.test}" if names else self.test


LOOK_ALIKES: Mapping[str, LookAlikes] = {
    "temperature": LookAlikes(
        ("model_config", "logit_processors"),
        "Ask the engine for one token with the log-probs of its 20 most likely ones: under another temperature all "
        "their differences are the trainer's times one factor, under a soft-cap or a penalty they are not.",
    ),
    "truncated_sampling": LookAlikes(
        ("logit_processors", "model_config"),
        "Print the parameters of a request as the engine holds them: top_p, top_k and min_p, but also banned tokens, a "
        "grammar and min_tokens. If all are off, the trainer's softmax counts something more (padding of the "
        "vocabulary).",
    ),
    "tool_tokens": LookAlikes(
        ("logit_processors", "misalignment"),
        "Decode a run of tokens whose log-prob is 0: a tool's output, text that a grammar forces, or the policy's own "
        "words, whose log-probs were lost and filled with 0.",
    ),
    "dropout": LookAlikes(
        ("padding", "routing"),
        "Score one batch twice in the same layout. If it differs, the trainer is random (dropout, jitter of routers). "
        "If it is equal, the layout decides: padding that is attended or counted.",
    ),
    "unreported_sampling": LookAlikes(
        (),
        "Compare all that was sampled, with entropies of the same logits: dropping completions by reward, length or "
        "likelihood, and entropies at another temperature, look the same.",
    ),
    "precision": LookAlikes(
        ("other_weights", "model_config", "prompt_difference"),
        "Run both sides in float32 once. What is left is not precision, or as small as what TF32 in kernels of a GPU "
        "leaves.",
    ),
    "policy_staleness": LookAlikes(
        ("stale_weights", "model_config", "prompt_difference", "precision"),
        "Sync, and score fresh rollouts. What differs at version lag 0 is not staleness.",
    ),
    "wrong_adapter": LookAlikes(
        ("stale_weights", "model_config", "prompt_difference", "precision"),
        "Load the trainer's adapter, or the merged weights, into the engine and score with it. What still differs is "
        "not the adapter.",
    ),
    "prompt_difference": LookAlikes(
        ("other_weights", "model_config", "precision"),
        "Compare the ids of one rendered prompt on both sides. If they are equal, the hashes were made differently.",
    ),
    "logit_processors": LookAlikes(
        ("tool_tokens", "misalignment"),
        "Decode some of the tokens whose log-prob is 0: what a grammar, a budget or a prefix forces, a tool's output, "
        "or the policy's own words, whose log-probs were lost and filled with 0.",
    ),
    "stale_weights": LookAlikes(
        ("precision", "model_config", "wrong_adapter"),
        "Sync, and score fresh rollouts of every engine. What still differs is not staleness.",
    ),
}


PENALISED, REPEATS = 0.5, LookAlikes(
    ("policy_staleness", "stale_weights"),
    "Print the penalties of a request as the engine holds them. If there are none, the engine has other weights: a "
    "policy that learned to repeat what it said looks like this beside an older one.",
)  # fmt: skip
"""Lean of tokens that their row holds already, above which the cause was read from it, and what looks like that."""


def alternatives(evidence: TokenEvidence, cause: str, features: Features) -> LookAlikes | None:
    """What else would look like a cause that was named from log-probs or declarations; None = nothing known.

    Causes that the declarations or a comparison rule out are left out.
    """
    found = LOOK_ALIKES.get(cause)
    if cause == "logit_processors" and features.penalised > PENALISED:
        found = REPEATS
    if found is None:
        return None
    out: frozenset[str] = frozenset()
    if evidence.engine is not None and evidence.trainer is not None:
        out = excluded(evidence.engine, evidence.trainer)
    topics = {"model_config": "model_config", "other_weights": "weights", "prompt_difference": "prompts"}
    kept = tuple(one for one in found.causes if one not in out and topics.get(one) not in evidence.compared)
    return LookAlikes(kept, found.test)


def against(evidence: TokenEvidence, features: Features, cause: str) -> str:
    """What speaks against a cause that traces or declarations support; empty if nothing does."""
    rule = _RULES.get(cause)
    return "" if rule is None else rule(evidence, features)


def _tool_tokens(evidence: TokenEvidence, features: Features) -> str:
    if features.forced_last > AT_THE_END:
        return f"{features.forced_last:.0%} of these zeros go on to the end of their row: no answer follows"
    if features.forced_fixed > Limits.forced_fixed:
        return ""
    sides = (evidence.engine, evidence.trainer)
    if any(side is not None and side.tools is not None for side in sides) and not any(
        side is not None and side.tools for side in sides
    ):
        return "no tools are declared: a grammar that forces tokens gives zeros, too"
    return ""


def _temperature(evidence: TokenEvidence, features: Features) -> str:
    if features.forced_fixed > Limits.forced_fixed:
        return "the engine's zeros are the same tokens at the same places in every row: nobody drew them"
    if evidence.entropies is None:
        return f"{_NO_ENTROPIES}: whatever flattens or sharpens the distribution looks like this"
    return ""


SURE = 2.0
"""Standard errors beyond which rare tokens are known not to be missing."""
_NO_ENTROPIES = "no entropies were recorded, with which it could be told apart"


def _as_sharp(features: Features) -> str:
    return f"{features.temperature_fit:.0%} of it follows from how sharp the distribution is, as under a temperature"


def _from_the_first(_evidence: TokenEvidence, features: Features) -> str:
    """Weights, prompts and formats change the first token as well; what depends on the tokens before does not."""
    if features.first < EXACT_FIRST:
        return "the first token of each response agrees: it begins later, with the tokens before (a penalty, a cache)"
    return ""


def _weights(evidence: TokenEvidence, features: Features) -> str:
    """Other weights change a token wherever it stands, and equal tokens alike; other prompts and windows do neither."""
    if but := _from_the_first(evidence, features):
        return but
    if features.by_token > BY_TOKEN:
        return ""
    if features.early > EARLY:
        return (
            f"the first tokens differ {features.early:.2g} times as much as the average token, as after other prompts"
        )
    if features.early < LATE:
        return f"the first tokens hardly differ ({features.early:.2g} times the average token): it begins later"
    return ""


def _lagging(evidence: TokenEvidence, features: Features) -> str:
    """A declared lag has the size of its updates. It is there in every asynchronous run."""
    sides = (evidence.engine, evidence.trainer)
    versions = [side.weight_version for side in sides if side is not None and side.weight_version is not None]
    lag = abs(versions[0] - versions[1]) if len(versions) == 2 else 0
    if lag and features.k3 > LARGEST_STEP * lag**2:
        return (
            f"KL {features.k3:.2g} nats per token is more than {lag} update{'s' * (lag > 1)} of the weights should make"
        )
    if features.temperature_fit > MOSTLY_SHARPER:
        return (
            f"{features.temperature_fit:.0%} of it follows from how sharp the distribution is, as under a temperature"
        )
    return _weights(evidence, features)


def _truncated(evidence: TokenEvidence, features: Features) -> str:
    """Tokens that are never drawn lower the mean of -log p below the entropy; a test without power says nothing."""
    missing, surprise = features.missing_tail, features.surprise
    if evidence.entropies is None:
        return f"{_NO_ENTROPIES}: a softmax over more tokens, or a ban, gives such ratios, too"
    if math.isnan(surprise):
        return "too few tokens, or no entropies of this distribution, to see whether the rare ones are missing"
    error = abs(surprise / features.surprise_z) if features.surprise_z else math.inf
    if surprise + missing > SURE * error:
        return (
            f"tokens are as rare as without truncation: the mean of -log p is {surprise:+.2g} nats from the entropy, "
            f"and such a kept mass would make it {-missing:.2g} or less"
        )
    return ""


def _precision(evidence: TokenEvidence, features: Features) -> str:
    """Rounding has a size, no direction and no place, and a simulation is like it at least in part."""
    lefts = [left_share(evidence, name) for name in evidence.tested if name.split(":")[1:2] == ["precision"]]
    if lefts and min(lefts) > UNLIKE:
        return f"of the roundings that were simulated none is like it (the best leaves {min(lefts):.0%})"
    limit = _largest_rounding(evidence) * (WITH_EXPERTS if features.has_experts else 1.0)
    if features.k3 > limit:
        return f"KL {features.k3:.2g} nats per token, and the declared formats explain {limit:.2g} at most"
    if features.k3 < _least_rounding(evidence):
        return f"KL {features.k3:.2g} nats per token is far less than the declared format leaves in any model"
    if features.exact_rows > EXACT_ROWS:
        return f"{features.exact_rows:.0%} of the rows agree at every token: rounding is in all of them"
    if features.temperature_fit > SHARPER:
        return (
            f"{features.temperature_fit:.0%} of it follows from how sharp the distribution is, as under a temperature"
        )
    if (but := _from_the_first(evidence, features)) and not _rounds_the_cache(evidence):
        return but
    # noise of any kind costs -KL on average
    if abs(features.drift + math.sqrt(features.k3 / 2)) > LEAN:
        return f"the differences lean to one side (mean / root mean square {features.drift:.2g})"
    if features.in_few and not features.has_experts:
        return (
            f"2 % of the tokens make {features.top_tokens:.0%} of the mismatch (kurtosis {features.spikes:.2g}): "
            "rounding is in all of them"
        )
    if features.early > EARLY:
        return f"the first tokens differ {features.early:.2g} times as much as the average token"
    if features.by_token > BY_TOKEN:
        return f"equal tokens differ alike in different prompts (correlation {features.by_token:.2f})"
    return ""


def _rounds_the_cache(evidence: TokenEvidence) -> bool:
    """Whether keys and values are stored in fewer bits: the first token is predicted before any is read from there."""
    sides = (evidence.engine, evidence.trainer)
    return any(side is not None and compression(side) is not None for side in sides) or any(
        one.cause == "precision" and "keys and values" in one.what for one in evidence.seen
    )


def _largest_rounding(evidence: TokenEvidence) -> float:
    """The largest KL k3 that the declared or seen formats of both sides explain in a dense model."""
    known = [name for side in (evidence.engine, evidence.trainer) if side is not None
             for name in (side.dtype, side.quantization, side.kv_cache)]  # fmt: skip
    known += [f"{one.what} {one.engine} {one.trainer}" for one in evidence.seen if one.cause == "precision"]
    sizes = [_size_of(name) for name in known if name and name not in ("none", "auto", "float32")]
    return max(sizes, default=LARGEST_OTHER)


def _least_rounding(evidence: TokenEvidence) -> float:
    """KL k3 below which arithmetic in 16 bits on one side is not it; 0 where none is declared, or on both sides."""
    engine, trainer = evidence.engine, evidence.trainer
    if engine is None or trainer is None or engine.low_precision == trainer.low_precision:
        return 0.0
    return _size_of(str(engine.dtype if engine.low_precision else trainer.dtype)) / LEAST_ROUNDING


def _size_of(text: str) -> float:
    named = [size for name, size in LARGEST_ROUNDING.items() if name in text]
    return max(named, default=LARGEST_OTHER)


_RULES = {
    "tool_tokens": _tool_tokens,
    "temperature": _temperature,
    "truncated_sampling": _truncated,
    "precision": _precision,
    "policy_staleness": _lagging,
    "stale_weights": _weights,
    "wrong_adapter": _weights,
    "prompt_difference": _from_the_first,
}
