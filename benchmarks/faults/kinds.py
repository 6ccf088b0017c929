"""The kinds of fault: what is done, which answers are right, and on which side of the wall each kind is.

The wall: kinds, not seeds, are split. A kind of the tune side may be looked at while the attribution changes; a kind of
the report side may not, and its numbers are read once, at the end. A hash of the name decides (:func:`split_of`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Literal

import contexts
import engine_faults as e
import time_faults as r
import torch
import trainer_faults as t
from engine_faults import Inject
from sampler import Order, plain, reporting_raw, speculated
from time_faults import RunFault
from torch import nn
from worlds import Made, World, padded_pass

Split = Literal["tune", "report"]
SALT = 0
"""The smallest number for which each family has a kind on both sides and neither side has more than 55 % of the kinds.
It was chosen from the names, before any case existed. A new kind does not move the others."""
CLEAN = "clean"
ALL = ("smollm2", "qwen", "moe")
DENSE = ("smollm2", "qwen")
SMALL = ("qwen", "moe")

OLDER = ("other_weights", "policy_staleness")
"""Answers that lead to the same fix as stale weights: sync, and look whether they arrived."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Args:
        name: unique; the split hangs on it.
        family: faults of the same part of the system.
        right: causes of ``trl_offpolicy.diagnosis.causes`` that count as right; "unknown" if no cause stands for it.
        inject: makes the batch.
        sane: causes that count as sane: their fix is the same, or would lead there at once.
        models: worlds that have it.
        hidden: the log-probs agree, because the engine does not report what it sampled from.
        run: in place of ``inject``: a fault over time, which gives a recorded run.
    """

    name: str
    family: str
    right: tuple[str, ...]
    inject: Inject | None = None
    sane: tuple[str, ...] = ()
    models: tuple[str, ...] = ALL
    hidden: bool = False
    run: RunFault | None = None

    @property
    def split(self) -> Split:
        return split_of(self.name)


def split_of(name: str, salt: int = SALT) -> Split:
    """The side of a kind, by the first bit of a hash of its name.

    Example:
        >>> split_of("rope_theta") == split_of("rope_theta")
        True
    """
    return "tune" if sha256(f"{salt}:{name}".encode()).digest()[0] < 128 else "report"


def _prompts() -> list[Kind]:
    right = ("prompt_difference",)

    def kind(name: str, inject: Inject, models: tuple[str, ...] = DENSE, **others: tuple[str, ...]) -> Kind:
        return Kind(name, "prompts", **{"right": right, **others}, inject=inject, models=models)

    dated = "Today is 22 November 2026. Think step by step."
    mixed = ("prompt_difference", "misalignment")
    return [
        kind("doubled_bos", e.gets("BOS twice in the engine", e.with_bos), ALL),
        kind("date_in_system_prompt", e.gets("a date in the system prompt", lambda w: w.rendered(system=dated))),
        kind("missing_newline", e.gets("no newline after assistant", e.without_last)),
        kind("prompt_cut_left", e.gets("first third of the prompt cut", e.cut_left), ALL),
        kind("prompt_cut_inside", e.gets("a part of the question is missing", e.cut_right), ALL),
        kind("other_template", e.gets("User:/Assistant: in place of the chat template", e.other_template)),
        kind("empty_system_prompt", e.gets("an empty system prompt", lambda w: w.rendered(system=""))),
        kind("swapped_prompts", e.gets("every group has the next one's prompt", e.next_group), ALL, right=mixed),
        kind("two_prompts_swapped", e.gets("two groups have each other's prompt", e.first_two_swapped), ALL, right=mixed),
        kind("trainer_no_system_prompt", t.sees("trainer without system prompt", lambda w: w.rendered(system=None))),
        kind("trainer_no_template", t.sees("trainer without template", lambda w: w.rendered(template=False))),
        kind("trainer_no_generation_prompt", t.sees("trainer without 'assistant'", lambda w: w.rendered(generation=False))),
        kind("trainer_doubled_bos", t.sees("BOS twice in the trainer", e.with_bos), ALL),
    ]  # fmt: skip


def _sampling() -> list[Kind]:
    def kind(name: str, right: str, inject: Inject, *sane: str, models: tuple[str, ...] = ALL, hidden: bool = False) -> Kind:
        return Kind(name, "sampling", (right,), inject, sane, models, hidden)

    processors, cut, unreported = "logit_processors", "truncated_sampling", "unreported_sampling"
    cool = e.head(0.7)
    return [
        kind("temperature_0.9", "temperature", e.draws("temperature 0.9", lambda _w: plain(e.head(0.9)), temperature=0.9)),
        kind("temperature_1.2", "temperature", e.draws("temperature 1.2", lambda _w: plain(e.head(1.2)), temperature=1.2)),
        kind("undeclared_temperature_0.97", "temperature", e.draws("temperature 0.97", lambda _w: plain(e.head(0.97)))),
        kind("trainer_temperature", "temperature", t.scores_at(0.8)),
        kind("top_p", cut, e.truncated(top_p=0.9)),
        kind("top_k", cut, e.truncated(top_k=10)),
        kind("min_p", cut, e.truncated(min_p=0.1)),
        kind("undeclared_top_p", cut, e.draws("top_p 0.95", lambda _w: plain(e.head(top_p=0.95)))),
        kind("logit_bias", processors, e.draws("bias +2 on five tokens", lambda w: e.biased(w, 2.0))),
        kind("negative_logit_bias", processors, e.draws("bias -2 on five tokens", lambda w: e.biased(w, -2.0))),
        kind("repetition_penalty", processors, e.draws("repetition penalty 1.1", lambda _w: e.repetition(1.1))),
        kind("presence_penalty", processors, e.draws("presence penalty 0.5", lambda _w: e.presence(0.5))),
        kind("frequency_penalty", processors, e.draws("frequency penalty 0.3", lambda _w: e.frequency(0.3))),
        kind("banned_eos", processors, e.draws("min_tokens: no end", lambda w: e.banned(w.stop)), cut),
        kind("bad_word", processors, e.draws("the most frequent token banned", lambda w: e.banned(e.frequent(w, 1))), cut),
        kind("grammar", processors, e.draws("digits banned", e.no_digits), cut),
        kind("raw_logps_at_temperature", unreported,
             e.draws("raw log-probs at temperature 0.7", lambda _w: reporting_raw(cool)), "temperature", hidden=True),
        kind("raw_logps_under_top_p", unreported,
             e.draws("raw log-probs under top-p 0.8", lambda _w: reporting_raw(e.head(top_p=0.8))), cut, hidden=True),
        kind("lossy_speculation", unreported,
             e.draws("a flat draft accepted twice too often", lambda _w: speculated(flatness=1.8, leniency=2.5)), hidden=True),
        kind("best_of_two", unreported, e.best_of_two, hidden=True, models=SMALL),
        Kind("renormalised_over_top_20", "sampling", (cut, unreported),
             e.draws("log-probs renormalised over the 20 most likely", lambda _w: e.renormalised(20)), ("misalignment",)),
    ]  # fmt: skip


def _architecture() -> list[Kind]:
    def kind(name: str, inject: Inject, *sane: str, models: tuple[str, ...] = ALL) -> Kind:
        return Kind(name, "architecture", ("model_config",), inject, sane, models)

    m = e.of_model
    return [
        kind("rope_theta", e.computes("RoPE base 0.5 times", m(contexts.rope_theta, 0.5))),
        kind("rope_scaling", e.computes("RoPE scaled linearly by 1.5", m(contexts.rope, lambda f: f / 1.5))),
        kind("norm_eps", e.computes("norm epsilon 1e-2", m(contexts.norm_eps, 1e-2))),
        kind("attention_scale", e.computes("attention scale 0.9 times", m(contexts.attention_scale, 0.9))),
        kind("attention_softcap", e.computes("attention logits capped at 5",
                                             lambda _w: contexts.attention_logits(cap=5.0))),
        kind("logit_softcap", e.computes("logits capped at 15", m(contexts.logits_changed,
                                                                  lambda x: contexts.softcapped(x, 15.0))), "temperature"),
        kind("sliding_window", e.computes("window of 16 tokens", lambda _w: contexts.attention_logits(window=16))),
        kind("mlp_activation", e.computes("GELU instead of SiLU", m(contexts.activation, nn.functional.gelu)), models=DENSE),
        kind("embedding_scale", e.computes("embedding 1.05 times", lambda w: e.embedding_scaled(w, 1.05))),
        kind("no_q_k_norm", e.computes("no norms of q and k", e.without_q_k_norms), models=SMALL),
        kind("padded_vocabulary", e.draws("padding of the vocabulary counts in the softmax", e.padded_vocabulary), "unknown"),
        kind("fewer_experts", e.computes("one expert a token", e.fewer_experts), "routing", models=("moe",)),
    ]  # fmt: skip


def _precision() -> list[Kind]:
    def kind(name: str, inject: Inject, *sane: str, models: tuple[str, ...] = ALL) -> Kind:
        return Kind(name, "precision", ("precision",), inject, sane, models)

    m, kv, weights = e.of_model, contexts.kv_rounded, contexts.weights_rounded
    return [
        kind("kv_fp8", e.computes("KV cache in fp8", lambda _w: kv(contexts.fp8_unscaled), kv_cache="fp8")),
        kind("kv_int8", e.computes("KV cache in int8", lambda _w: kv(contexts.int8), kv_cache="int8")),
        kind("kv_bf16", e.computes("KV cache in bf16", lambda _w: kv(contexts.bf16), kv_cache="bfloat16")),
        kind("bf16_engine", e.computes("bf16 engine", e.cast("bfloat16"), dtype="bfloat16"), models=DENSE),
        kind("fp16_engine", e.computes("fp16 engine", e.cast("float16"), dtype="float16"), models=DENSE),
        kind("bf16_weights", e.computes("weights in bf16", m(weights, contexts.bf16, head=True))),
        kind("int8_weights", e.computes("weights in int8", m(weights, contexts.int8), quantization="int8"), models=DENSE),
        kind("int4_weights", e.computes("weights in int4", m(weights, contexts.int4_groups), quantization="int4"),
             models=DENSE),
        kind("fp8_weights", e.computes("weights in fp8", m(weights, contexts.fp8), quantization="fp8"), models=DENSE),
        kind("undeclared_int8_weights", e.computes("weights in int8, unsaid", m(weights, contexts.int8)), models=DENSE),
        kind("fp8_activations", e.computes("inputs of linear layers in fp8", m(contexts.inputs_rounded, contexts.fp8)),
             models=DENSE),
        kind("int8_activations", e.computes("inputs of linear layers in int8", m(contexts.inputs_rounded, contexts.int8)),
             models=DENSE),
        kind("lm_head_bf16", e.computes("head in bf16", lambda w: e.head_changed(w, contexts.bf16))),
        kind("quantised_head", e.computes("head in int8", lambda w: e.head_changed(w, contexts.int8))),
        kind("logits_bf16", e.computes("logits in bf16", m(contexts.logits_changed, contexts.bf16))),
        kind("edge_layers_int8", e.computes("first and last layer in int8", e.edge_layers_int8), models=DENSE),
        kind("undeclared_bf16_trainer", t.scores_in("bf16 trainer, unsaid", e.cast("bfloat16")), models=DENSE),
        kind("trainer_logits_bf16", t.scores_by("trainer's logits in bf16", t.bf16_logits)),
    ]  # fmt: skip


def _bookkeeping() -> list[Kind]:
    right = ("misalignment",)

    def kind(name: str, inject: Inject, *sane: str, models: tuple[str, ...] = ALL, more: tuple[str, ...] = ()) -> Kind:
        return Kind(name, "bookkeeping", (*right, *more), inject, sane, models)

    shifts = [kind(f"shift_{'late' if step > 0 else 'early'}_{abs(step)}", t.shifted(step)) for step in (1, 2, 3, -1, -2, -3)]
    return [
        *shifts,
        kind("shift_in_a_quarter", t.shifted(1, every=4)),
        kind("swapped_rows_in_group", t.reports("log-probs of the next row of the group", t.rotated_rows(1))),
        kind("swapped_rows_between_groups", t.reports("log-probs of another group's row", t.rotated_rows(4))),
        kind("two_rows_swapped", t.reports("two rows have each other's log-probs", t.two_rows_swapped)),
        kind("cumulative_logps", t.reports("running sums", t.cumulative)),
        kind("mean_logps", t.reports("every token has its row's mean", t.averaged)),
        kind("logps_in_bits", t.reports("log-probs in base 2", lambda _w, x: x / 0.6931471805599453)),
        kind("logps_in_base_10", t.reports("log-probs in base 10", lambda _w, x: x / 2.302585092994046)),
        kind("clipped_logps", t.reports("log-probs not below -3", lambda _w, x: x.clip(-3.0)), "unknown"),
        kind("probabilities", t.reports("probabilities, not logs", lambda _w, x: 2.718281828459045**x)),
        kind("top_token_logps", t.reports("the most likely token's log-prob", t.top_tokens)),
        kind("two_decimals", t.reports("log-probs rounded to two decimals", lambda _w, x: x.round(2)), "unknown",
             more=("precision",)),
        kind("retokenised", t.retokenised(1), models=DENSE),
        kind("one_row_retokenised", t.retokenised(24, first=7), models=DENSE),
        kind("first_token_lost", t.dropped_first, "prompt_difference"),
        Kind("tool_tokens", "bookkeeping", ("tool_tokens",), t.tool_tokens(1)),
        Kind("tool_tokens_in_a_quarter", "bookkeeping", ("tool_tokens",), t.tool_tokens(4)),
    ]  # fmt: skip


def _weights() -> list[Kind]:
    stale, adapter = ("stale_weights",), ("wrong_adapter",)

    def kind(name: str, inject: Inject, right: tuple[str, ...] = stale, *, sane: tuple[str, ...] = OLDER,
             models: tuple[str, ...] = ALL) -> Kind:  # fmt: skip
        return Kind(name, "weights", right, inject, sane, models)

    def older(back: float) -> Inject:
        return e.holds(f"lag {back}", lambda w, _n: (e.version_of(w, back), 1.0))

    either = (*stale, *adapter)  # the base is both the first version and no adapter
    known = e.holds("lag 2, declared", lambda w, _n: (e.version_of(w, 2), 1.0), weight_version=3)
    half = e.stale_where("lower half of the layers stale", lambda w, n: e.layer_of(n) < e.middle_layer(w))
    one = e.stale_where("one layer at the base", lambda w, n: e.layer_of(n) == e.middle_layer(w), back=5)
    qkv = e.stale_where("q, k, v stale", lambda _w, n: any(f"{x}_proj" in n for x in "qkv"))
    mlp = e.stale_where("MLPs stale", lambda _w, n: ".mlp." in n)
    expert = e.stale_where("one expert stale in each layer", lambda _w, n: "experts" in n, back=5)
    router = e.stale_where("routers stale", lambda _w, n: "mlp.gate" in n, back=5)
    embedding = e.stale_where("embedding stale", lambda _w, n: "embed_tokens" in n, back=5)
    norms = e.stale_where("norms stale", lambda _w, n: "norm" in n, back=5)
    return [
        kind("stale_lag_1", older(1)),
        kind("stale_lag_4", older(4), either),
        kind("known_lag_2", known, ("policy_staleness",), sane=("stale_weights", "other_weights")),
        kind("half_of_the_layers_stale", half),
        kind("one_layer_missing", one),
        kind("q_k_v_stale", qkv),
        kind("mlps_stale", mlp, models=DENSE),
        kind("experts_stale", expert, models=("moe",)),
        kind("routers_stale", router, sane=(*OLDER, "routing"), models=("moe",)),
        kind("embedding_stale", embedding),
        kind("tied_head_stale", e.computes("tied head stale", e.tied_head_stale), models=("smollm2",)),
        kind("norms_stale", norms, models=SMALL),
        kind("wrong_adapter", e.holds("another adapter", lambda _w, _n: ("other", 1.0)), adapter),
        kind("no_adapter", older(5), either, sane=OLDER),
        kind("adapter_scale_half", e.holds("adapter at half scale", lambda w, _n: (e.version_of(w, 0), 0.5)), adapter,
             sane=(*OLDER, "stale_weights")),
        kind("adapter_scale_double", e.holds("adapter at double scale", lambda w, _n: (e.version_of(w, 0), 2.0)), adapter,
             sane=("other_weights",)),
        kind("trainer_scores_reference", t.base_scores, (*either, "other_weights", "policy_staleness"), sane=()),
    ]  # fmt: skip


def _trainer() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], inject: Inject, *sane: str, models: tuple[str, ...] = ALL) -> Kind:
        return Kind(name, "trainer", right, inject, sane, models)

    drop, pad = ("dropout",), ("padding",)
    m = e.of_model
    return [
        kind("attention_dropout", drop, t.scores_in("attention dropout 0.1", m(contexts.attention_dropout, 0.1))),
        kind("mlp_dropout", drop, t.scores_in("MLP dropout 0.1", m(contexts.mlp_dropout, 0.1))),
        kind("lora_dropout", drop,
             t.scores_in("LoRA dropout 0.1", lambda w: contexts.adapter_dropout(w.weights, 0.1), dropout=0.1), models=DENSE),
        kind("noisy_kernels", ("unknown", "precision", "dropout"), t.scores_in("noise of 1 % in linear layers", t.noisy(0.01))),
        kind("padding_attended", pad, t.scores_by("padding attended", padded_pass(attended=True, positions="all"))),
        kind("left_padding_positions", pad,
             t.scores_by("padding counts in the prompt's positions", padded_pass(attended=False, positions="prompt")),
             "model_config"),
        kind("packing_leak", pad, t.scores_by("every second row sees the row before", t.packed), "prompt_difference"),
    ]  # fmt: skip


def _routing() -> list[Kind]:
    def kind(name: str, inject: Inject) -> Kind:
        return Kind(name, "routing", ("routing",), inject, ("precision",), ("moe",))

    return [
        kind("router_bf16", e.computes("routers in bf16", e.rough(8, select_only=False))),
        kind("router_fp8", e.computes("routers in 5 bits", e.rough(5, select_only=False))),
        kind("expert_flips", e.computes("experts chosen in 6 bits", e.rough(6, select_only=True))),
    ]


def _mixtures() -> list[Kind]:
    def kind(name: str, right: tuple[str, str], inject: Inject, models: tuple[str, ...] = DENSE) -> Kind:
        return Kind(name, "mixtures", right, inject, (), models)

    bf16, int8 = e.cast("bfloat16"), e.of_model(contexts.weights_rounded, contexts.int8)

    def lag_1(world: World) -> object:
        return world.weights.at(e.version_of(world, 1))

    return [
        kind("bf16_and_temperature", ("precision", "temperature"),
             e.both("bf16, temperature 0.95", bf16, lambda _w: plain(e.head(0.95)), dtype="bfloat16")),
        kind("top_p_and_stale", ("truncated_sampling", "stale_weights"),
             e.both("top-p 0.9, lag 1", lag_1, lambda _w: plain(e.head(top_p=0.9))), ALL),
        kind("int8_and_doubled_bos", ("precision", "prompt_difference"),
             e.both("int8 weights, BOS twice", int8, seen=e.with_bos, quantization="int8")),
        kind("penalty_and_bf16", ("logit_processors", "precision"),
             e.both("presence penalty 0.3, bf16", bf16, lambda _w: e.presence(0.3), dtype="bfloat16")),
        kind("shift_and_stale", ("misalignment", "stale_weights"), _shift_and_stale, ALL),
    ]  # fmt: skip


def _shift_and_stale(world: World) -> Made:
    made = e.holds("lag 1, one token late", lambda w, _n: (e.version_of(w, 1), 1.0))(world)
    batch, scored = made.batch, world.score(made.batch)
    logps = batch.logps.copy()
    logps[:, 1:], logps[:, 0] = batch.logps[:, :-1], float("nan")
    return Made(made.fault, type(batch)(batch.prompt_ids, batch.ids, logps), scored)


def _over_time() -> list[Kind]:
    def kind(name: str, right: str, run: RunFault, *sane: str, models: tuple[str, ...] = SMALL) -> Kind:
        return Kind(name, "time", (right,), None, sane, models, run=run)

    half, last = r.STEPS // 2, 3
    return [
        kind("sync_fails_from_half_way", "stale_weights", RunFault("no sync from half-way on", lambda s: min(s, half)), *OLDER),
        kind("every_second_sync_fails", "stale_weights", RunFault("every second sync fails", lambda s: s - s % 2), *OLDER),
        kind("growing_staleness", "policy_staleness",
             RunFault("a queue that grows", lambda s: s - s // 3, known=True), "stale_weights", "other_weights"),
        kind("constant_lag", "policy_staleness",
             RunFault("three steps behind", lambda s: max(0, s - last), known=True), "stale_weights", "other_weights"),
        kind("sub_ulp_syncs", "sync_rounding",
             RunFault("updates below the ulp of a bf16 engine", inside=r.sub_ulp, engine={"dtype": "bfloat16"}), *OLDER),
        kind("never_synced", "stale_weights", RunFault("the first weights to the end", lambda _s: 0), *OLDER),
        kind("row_retokenised_from_half_way", "misalignment",
             RunFault("one row in twelve tokenised again from half-way on", change=r.retokenised_row), models=("qwen",)),
        kind("shift_from_half_way", "misalignment", RunFault("a token late from half-way on", change=r.shifted_late)),
        kind("temperature_from_half_way", "temperature",
             RunFault("temperature 0.8 from half-way on", drawing=r.cooler_late)),
        kind("int4_from_half_way", "precision", RunFault("int4 from half-way on", inside=r.int4_late), models=("qwen",)),
    ]  # fmt: skip


def _clean() -> list[Kind]:
    def kind(name: str, inject: Inject, models: tuple[str, ...] = ALL) -> Kind:
        return Kind(name, CLEAN, ("none",), inject, (), models)

    def ordered(fault: str, **order: int) -> Inject:
        return lambda world: Made(fault, world.sample(order=Order(**order)))

    def same_dtype(name: str) -> Inject:
        def inject(world: World) -> Made:
            inside = partial(contexts.cast, world.model, getattr(torch, name))
            batch = world.sample(inside=inside)
            both = {"dtype": name}
            return Made(f"{name} on both sides", batch, world.score(batch, inside=inside), both, both)

        return inject

    def threads(world: World) -> Made:
        before = torch.get_num_threads()
        torch.set_num_threads(3 - min(before, 2))
        try:
            batch = world.sample()
        finally:
            torch.set_num_threads(before)
        return Made("another number of threads", batch)

    def compiled(world: World) -> Made:
        parts = [module for name, module in world.model.named_modules() if name.endswith(".mlp")]
        for part in parts:  # the whole model would be compiled again for each length of the cache: minutes
            part.forward = torch.compile(part.forward, dynamic=True)
        try:
            batch = world.sample()
        finally:
            for part in parts:
                del part.forward
        return Made("an engine with compiled MLPs", batch)

    harmless = padded_pass(attended=False, positions="all")
    return [
        kind("clean", lambda world: Made("nothing", world.sample())),
        kind("clean_bf16_on_both_sides", same_dtype("bfloat16"), DENSE),
        kind("clean_fp16_on_both_sides", same_dtype("float16"), ("qwen",)),
        kind("clean_one_at_a_time", ordered("batches of one", rows=1)),
        kind("clean_batches_of_five", ordered("batches of five", rows=5)),
        kind("clean_chunked_prefill", ordered("prompts in chunks of 7", chunk=7)),
        kind("clean_threads", threads),
        kind("clean_compiled", compiled, ("qwen",)),
        kind("clean_left_padding", t.scores_by("padding counts in all positions", harmless)),
    ]


KINDS: dict[str, Kind] = {
    kind.name: kind
    for family in (_prompts, _sampling, _architecture, _precision, _bookkeeping, _weights, _trainer, _routing, _mixtures,
                   _over_time)
    for kind in family()
}  # fmt: skip
CLEANS: dict[str, Kind] = {kind.name: kind for kind in _clean()}


def kind_of(name: str) -> Kind:
    """The kind of a case."""
    return CLEANS[name] if name in CLEANS else KINDS[name]
