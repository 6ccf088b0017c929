"""One table of the settings under which the engine samples from another policy than that of its weights.

``refuse``: the log-probs are not those of a distribution that the trainer could score, so a correction would be biased.
``warn``: they are those of another policy, for which a correction can account, or something may keep old state alive.
``note``: there is no harm by itself. The names are vLLM's (as of 0.31): those of ``SamplingParams`` for requests, and
of ``LLM`` for engines.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["refuse", "warn", "note"]
SEVERITIES: tuple[Severity, ...] = ("refuse", "warn", "note")


@dataclass(frozen=True, kw_only=True)
class SettingFinding:
    """One setting that changes the sampling policy.

    Args:
        severity: what it means for a correction.
        setting: its name and value.
        reason: what the engine does.
        remedy: what to set instead.
    """

    severity: Severity
    setting: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.reason}; {self.remedy}"


@dataclass(frozen=True)
class Rule:
    """Decides when a setting is a finding.

    Args:
        severity: severity of the finding.
        reason: reason of the finding.
        remedy: remedy of the finding.
        neutral: values without effect, besides None and empty ones.
        concerns: further test of the value; None = every value that is not neutral is a finding.
    """

    severity: Severity
    reason: str
    remedy: str
    neutral: tuple[Any, ...] = ()
    concerns: Callable[[Any], bool] | None = None

    def applies(self, value: Any) -> bool:
        """True if this value is a finding."""
        empty = value is None or (isinstance(value, str | Sequence | Mapping) and not value)
        return not empty and value not in self.neutral and (self.concerns is None or self.concerns(value))


# -------------------------------------------------------------------------------------------------------- requests

_HISTORY = (
    "the engine changes the distribution by what was generated before, which the trainer does not mirror, so "
    "old/sampling is biased (its mean is not 1)"
)
_SUBSET = "the engine samples from a part of the vocabulary and renormalises, which the trainer does not mirror: "
_FORCED = "the engine puts tokens in place that no policy sampled"

REQUEST_RULES: dict[str, Rule] = {
    "repetition_penalty": Rule("refuse", _HISTORY, "set it to 1.0", (1.0,)),
    "frequency_penalty": Rule("refuse", _HISTORY, "set it to 0.0", (0.0,)),
    "presence_penalty": Rule("refuse", _HISTORY, "set it to 0.0", (0.0,)),
    "logit_bias": Rule("refuse", "the engine adds to the logits, the trainer does not", "leave it out"),
    "allowed_token_ids": Rule("refuse", _SUBSET + "old/sampling is the allowed mass", "leave it out"),
    "bad_words": Rule("refuse", _SUBSET + "old/sampling is the mass without them", "punish them in the reward"),
    "structured_outputs": Rule(
        "refuse", _SUBSET + "old/sampling is the mass that the grammar allows", "leave it out and reward the format"
    ),
    "thinking_token_budget": Rule("refuse", _FORCED + " when the budget is used up", "leave it out"),
    "trace_decode_token_ids": Rule("refuse", _FORCED, "leave it out"),
    "extra_args": Rule("warn", "arguments for logits processors, which the trainer does not mirror", "leave it out"),
    "min_tokens": Rule(
        "warn", _SUBSET + "old/sampling is 1 - p(end) in the first tokens", "reward the length", (0,)
    ),
    "ignore_eos": Rule(
        "warn", "text behind the end of sequence is sampled and trained on", "leave it out", (False,)
    ),
    "stop": Rule(
        "note", "a reply can end without an end-of-sequence token; its log-probs are right", "count on it in the reward"
    ),
}  # fmt: skip
_FORBIDDEN = {
    "logprobs": "the first entry would be the most likely token, not the sampled one",
    "n": "one completion a prompt is expected",
    "temperature": "the trainer would divide by another temperature; set the config's own field",
}
_OTHER_NAMES = {"structured_outputs_regex": "structured_outputs", "stop_token_ids": "stop"}


def request_findings(options: Mapping[str, Any], *, device_type: str) -> tuple[SettingFinding, ...]:
    """What the sampling options of requests do to the policy. The trainer mirrors top_p, top_k and min_p: no finding.

    Args:
        options: TRL's sampling fields by vLLM's names, and ``generation_kwargs``, whose entries win, as in TRL.
        device_type: "cpu" or an accelerator.
    """
    extra = dict(options.get("generation_kwargs") or {})
    chosen = {**options, **extra}
    found = [
        SettingFinding(severity=rule.severity, setting=f"{name}={chosen[name]}", reason=rule.reason, remedy=rule.remedy)
        for name, rule in _named(REQUEST_RULES, _OTHER_NAMES).items()
        if name in chosen and rule.applies(chosen[name])
    ]
    found += [
        SettingFinding(severity="refuse", setting=f"generation_kwargs.{name}", reason=why, remedy="leave it out")
        for name, why in _FORBIDDEN.items()
        if name in extra
    ]
    if extra.get("seed") is not None:
        reason = "all requests would draw the same numbers, and copies of a prompt get the same completion"
        if device_type == "cpu":
            reason = "a seed per request stops vLLM's CPU engine"
        found.append(
            SettingFinding(severity="refuse", setting="generation_kwargs.seed", reason=reason, remedy="set engine.seed")
        )
    return tuple(found)


def _named(rules: Mapping[str, Rule], others: Mapping[str, str]) -> dict[str, Rule]:
    return {**rules, **{name: rules[same] for name, same in others.items()}}


# -------------------------------------------------------------------------------------------------------- the engine


def _accepts_drafts_at_will(config: Any) -> bool:
    """True for speculative decoding that accepts draft tokens by another rule than the target's probabilities."""
    if not isinstance(config, Mapping):
        return False
    return config.get("rejection_sample_method") == "synthetic" or "typical" in str(config.get("acceptance_method"))


ENGINE_RULES: dict[str, tuple[Rule, ...]] = {
    "logprobs_mode": (
        Rule(
            "refuse", "log-probs of another distribution than the one sampled from (before temperature and truncation, "
            "or logits)", "use processed_logprobs", ("processed_logprobs",),
        ),
    ),
    "logits_processors": (Rule("refuse", "code changes the logits before sampling, the trainer does not", "drop it"),),
    "watermark_config": (Rule("refuse", "tokens are chosen by a watermark, not by their probabilities", "drop it"),),
    "speculative_config": (
        Rule(
            "refuse", "draft tokens are accepted by another rule than the model's probabilities: the reported "
            "log-probs are not of the distribution sampled from", "use rejection_sample_method: standard or block",
            concerns=_accepts_drafts_at_will,
        ),
        Rule(
            "note", "the log-probs are the target model's and rejection sampling keeps its distribution; they come "
            "from another batch shape, and the draft model keeps its first weights, so it gets slower, not wrong",
            "compare mismatch with and without it once", concerns=lambda config: not _accepts_drafts_at_will(config),
        ),
    ),
    "kv_cache_dtype": (
        Rule(
            "warn", "keys and values are stored in another format than the model computes in: the engine's policy is "
            "another one, the more the longer the context", "use auto, or correct for it (offpolicy: paper/tis)",
            ("auto",),
        ),
    ),
    "quantization": (
        Rule(
            "warn", "the engine's weights are rounded, the trainer's are not", "correct for it (offpolicy: paper/tis)",
            ("none",),
        ),
    ),
    "hf_overrides": (Rule("warn", "the engine's model configuration is changed, not the trainer's", "change both"),),
    "kv_transfer_config": (
        Rule(
            "warn", "keys and values are also kept outside of the engine and can outlive a change of weights; this kit "
            "asks the connector to forget them, TRL's NCCL path does not", "leave it out",
        ),
    ),
    "kv_offloading_size": (
        Rule(
            "warn", "as kv_transfer_config: offloaded keys and values can outlive a change of weights", "leave it out",
            (0,),
        ),
    ),
    "enable_prefix_caching": (
        Rule(
            "note", "keys and values of old weights are reused if the cache is not reset at a sync; it is, in every "
            "mode, and a reset that the engine declines is an error", "nothing, or false with a sync of your own",
            (False,),
        ),
    ),
}  # fmt: skip


def engine_findings(arguments: Mapping[str, Any]) -> tuple[SettingFinding, ...]:
    """What the arguments of an engine do to the policy.

    Args:
        arguments: those of ``vllm.LLM``, or :func:`server_arguments`.
    """
    found = [
        SettingFinding(
            severity=rule.severity, setting=f"{name}={arguments[name]}", reason=rule.reason, remedy=rule.remedy
        )
        for name, rules in ENGINE_RULES.items()
        for rule in rules
        if name in arguments and rule.applies(arguments[name])
    ]
    if arguments.get("quantization") and arguments.get("enable_lora"):
        reason = "the adapter is applied to a rounded base here, to the whole one in the trainer"
        found.append(
            SettingFinding(severity="warn", setting="enable_lora", reason=reason, remedy="merge (transfer: memory)")
        )
    return tuple(found)


_PLACES = {
    "logprobs_mode": "model_config",
    "logits_processors": "model_config",
    "quantization": "model_config",
    "hf_overrides": "model_config",
    "enable_prefix_caching": "cache_config",
    "kv_offloading_size": "cache_config",
}
_TOP_LEVEL = ("speculative_config", "kv_transfer_config", "watermark_config")


def server_arguments(vllm_config: Mapping[str, Any]) -> dict[str, Any]:
    """The ``vllm_config`` of a server's ``/server_info`` (JSON) under the names of ``LLM``'s arguments."""
    nested = {name: (vllm_config.get(place) or {}).get(name) for name, place in _PLACES.items()}
    nested["kv_cache_dtype"] = (vllm_config.get("cache_config") or {}).get("cache_dtype")
    nested["enable_lora"] = vllm_config.get("lora_config") is not None
    return {**nested, **{name: vllm_config.get(name) for name in _TOP_LEVEL}}


def flag_arguments(flags: Sequence[str]) -> dict[str, Any]:
    """Command-line flags of a server under the names of ``LLM``'s arguments; JSON values are parsed.

    Example:
        >>> flag_arguments(["--kv-cache-dtype", "fp8", "--no-enable-prefix-caching"])
        {'kv_cache_dtype': 'fp8', 'enable_prefix_caching': False}
    """
    import json

    words = [part for flag in flags for part in (flag.split("=", 1) if flag.startswith("--") else [flag])]
    found: dict[str, Any] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=False):
        if not word.startswith("--"):
            continue
        name = word.removeprefix("--").replace("-", "_")
        if after.startswith("--"):
            found[name.removeprefix("no_")] = not name.startswith("no_")
        else:
            found[name] = json.loads(after) if after.startswith("{") else after
    return found


# ---------------------------------------------------------------------------------------------------------- what to do


def judge(findings: Sequence[SettingFinding], *, needs_sampling: bool) -> None:
    """Refuse the findings or warn about them.

    Args:
        findings: the findings of the requests and of the engine.
        needs_sampling: a correction reads the engine's log-probs; otherwise only diagnostics would be biased.

    Raises:
        ValueError: a correction would be biased; the message names each setting with the reason.
    """
    refused = [str(one) for one in findings if one.severity == "refuse"]
    if refused and needs_sampling:
        raise ValueError("sampling options must leave the engine's log-probs comparable, but got " + "; ".join(refused))
    if refused:
        warnings.warn("Diagnostics will be biased: " + "; ".join(refused), stacklevel=3)
    for one in findings:
        if one.severity == "warn":
            warnings.warn(f"The sampling policy is another one. {one}.", stacklevel=3)


def described(findings: Sequence[SettingFinding]) -> list[dict[str, str]]:
    """The findings as plain mappings for ``run.json``."""
    return [asdict(one) for one in findings]
