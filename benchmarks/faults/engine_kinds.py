"""Kinds of fault of the engine: prompts, sampling, architecture, precision, weights, routing, and two at once."""

from __future__ import annotations

import contexts
import engine_faults as e
import trainer_faults as t
from engine_faults import Inject
from kind import ALL, DENSE, OLDER, SMALL, Kind
from sampler import plain, reporting_raw, speculated
from torch import nn
from worlds import Made, World


def prompts() -> list[Kind]:
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
        kind(
            "two_prompts_swapped", e.gets("two groups have each other's prompt", e.first_two_swapped), ALL, right=mixed
        ),
        kind("trainer_no_system_prompt", t.sees("trainer without system prompt", lambda w: w.rendered(system=None))),
        kind("trainer_no_template", t.sees("trainer without template", lambda w: w.rendered(template=False))),
        kind(
            "trainer_no_generation_prompt",
            t.sees("trainer without 'assistant'", lambda w: w.rendered(generation=False)),
        ),
        kind("trainer_doubled_bos", t.sees("BOS twice in the trainer", e.with_bos), ALL),
    ]


def sampling() -> list[Kind]:
    def kind(
        name: str, right: str, inject: Inject, *sane: str, models: tuple[str, ...] = ALL, hidden: bool = False
    ) -> Kind:
        return Kind(name, "sampling", (right,), inject, sane, models, hidden)

    processors, cut, unreported = "logit_processors", "truncated_sampling", "unreported_sampling"
    cool = e.head(0.7)
    return [
        kind(
            "temperature_0.9", "temperature", e.draws("temperature 0.9", lambda _w: plain(e.head(0.9)), temperature=0.9)
        ),
        kind(
            "temperature_1.2", "temperature", e.draws("temperature 1.2", lambda _w: plain(e.head(1.2)), temperature=1.2)
        ),
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
        kind(
            "bad_word", processors, e.draws("the most frequent token banned", lambda w: e.banned(e.frequent(w, 1))), cut
        ),
        kind("grammar", processors, e.draws("digits banned", e.no_digits), cut),
        kind(
            "raw_logps_at_temperature",
            unreported,
            e.draws("raw log-probs at temperature 0.7", lambda _w: reporting_raw(cool)),
            "temperature",
            hidden=True,
        ),
        kind(
            "raw_logps_under_top_p",
            unreported,
            e.draws("raw log-probs under top-p 0.8", lambda _w: reporting_raw(e.head(top_p=0.8))),
            cut,
            hidden=True,
        ),
        kind(
            "lossy_speculation",
            unreported,
            e.draws("a flat draft accepted twice too often", lambda _w: speculated(flatness=1.8, leniency=2.5)),
            hidden=True,
        ),
        kind("best_of_two", unreported, e.best_of_two, hidden=True, models=SMALL),
        Kind(
            "renormalised_over_top_20",
            "sampling",
            (cut, unreported),
            e.draws("log-probs renormalised over the 20 most likely", lambda _w: e.renormalised(20)),
            ("misalignment",),
        ),
    ]


def architecture() -> list[Kind]:
    def kind(name: str, inject: Inject, *sane: str, models: tuple[str, ...] = ALL) -> Kind:
        return Kind(name, "architecture", ("model_config",), inject, sane, models)

    m = e.of_model
    return [
        kind("rope_theta", e.computes("RoPE base 0.5 times", m(contexts.rope_theta, 0.5))),
        kind("rope_scaling", e.computes("RoPE scaled linearly by 1.5", m(contexts.rope, lambda f: f / 1.5))),
        kind("norm_eps", e.computes("norm epsilon 1e-2", m(contexts.norm_eps, 1e-2))),
        kind("attention_scale", e.computes("attention scale 0.9 times", m(contexts.attention_scale, 0.9))),
        kind(
            "attention_softcap",
            e.computes("attention logits capped at 5", lambda _w: contexts.attention_logits(cap=5.0)),
        ),
        kind(
            "logit_softcap",
            e.computes("logits capped at 15", m(contexts.logits_changed, lambda x: contexts.softcapped(x, 15.0))),
            "temperature",
        ),
        kind("sliding_window", e.computes("window of 16 tokens", lambda _w: contexts.attention_logits(window=16))),
        kind(
            "mlp_activation",
            e.computes("GELU instead of SiLU", m(contexts.activation, nn.GELU())),
            models=DENSE,
        ),
        kind("embedding_scale", e.computes("embedding 1.05 times", lambda w: e.embedding_scaled(w, 1.05))),
        kind("no_q_k_norm", e.computes("no norms of q and k", e.without_q_k_norms), models=SMALL),
        kind(
            "padded_vocabulary",
            e.draws("padding of the vocabulary counts in the softmax", e.padded_vocabulary),
            "unknown",
        ),
        kind("fewer_experts", e.computes("one expert a token", e.fewer_experts), "routing", models=("moe",)),
    ]


def precision() -> list[Kind]:
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
        kind(
            "int8_weights", e.computes("weights in int8", m(weights, contexts.int8), quantization="int8"), models=DENSE
        ),
        kind(
            "int4_weights",
            e.computes("weights in int4", m(weights, contexts.int4_groups), quantization="int4"),
            models=DENSE,
        ),
        kind("fp8_weights", e.computes("weights in fp8", m(weights, contexts.fp8), quantization="fp8"), models=DENSE),
        kind("undeclared_int8_weights", e.computes("weights in int8, unsaid", m(weights, contexts.int8)), models=DENSE),
        kind(
            "fp8_activations",
            e.computes("inputs of linear layers in fp8", m(contexts.inputs_rounded, contexts.fp8)),
            models=DENSE,
        ),
        kind(
            "int8_activations",
            e.computes("inputs of linear layers in int8", m(contexts.inputs_rounded, contexts.int8)),
            models=DENSE,
        ),
        kind("lm_head_bf16", e.computes("head in bf16", lambda w: e.head_changed(w, contexts.bf16))),
        kind("quantised_head", e.computes("head in int8", lambda w: e.head_changed(w, contexts.int8))),
        kind("logits_bf16", e.computes("logits in bf16", m(contexts.logits_changed, contexts.bf16))),
        kind("edge_layers_int8", e.computes("first and last layer in int8", e.edge_layers_int8), models=DENSE),
        kind("undeclared_bf16_trainer", t.scores_in("bf16 trainer, unsaid", e.cast("bfloat16")), models=DENSE),
        kind("trainer_logits_bf16", t.scores_by("trainer's logits in bf16", t.bf16_logits)),
    ]


def weights() -> list[Kind]:
    stale, adapter = ("stale_weights",), ("wrong_adapter",)

    def kind(
        name: str,
        inject: Inject,
        right: tuple[str, ...] = stale,
        *,
        sane: tuple[str, ...] = OLDER,
        models: tuple[str, ...] = ALL,
    ) -> Kind:
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
        kind(
            "adapter_scale_half",
            e.holds("adapter at half scale", lambda w, _n: (e.version_of(w, 0), 0.5)),
            adapter,
            sane=(*OLDER, "stale_weights"),
        ),
        kind(
            "adapter_scale_double",
            e.holds("adapter at double scale", lambda w, _n: (e.version_of(w, 0), 2.0)),
            adapter,
            sane=("other_weights",),
        ),
        kind("trainer_scores_reference", t.base_scores, (*either, "other_weights", "policy_staleness"), sane=()),
    ]


def routing() -> list[Kind]:
    def kind(name: str, inject: Inject) -> Kind:
        return Kind(name, "routing", ("routing",), inject, ("precision",), ("moe",))

    return [
        kind("router_bf16", e.computes("routers in bf16", e.rough(8, select_only=False))),
        kind("router_fp8", e.computes("routers in 5 bits", e.rough(5, select_only=False))),
        kind("expert_flips", e.computes("experts chosen in 6 bits", e.rough(6, select_only=True))),
    ]


def mixtures() -> list[Kind]:
    def kind(name: str, right: tuple[str, str], inject: Inject, models: tuple[str, ...] = DENSE) -> Kind:
        return Kind(name, "mixtures", right, inject, (), models)

    bf16, int8 = e.cast("bfloat16"), e.of_model(contexts.weights_rounded, contexts.int8)

    def lag_1(world: World) -> object:
        return world.weights.at(e.version_of(world, 1))

    return [
        kind(
            "bf16_and_temperature",
            ("precision", "temperature"),
            e.both("bf16, temperature 0.95", bf16, lambda _w: plain(e.head(0.95)), dtype="bfloat16"),
        ),
        kind(
            "top_p_and_stale",
            ("truncated_sampling", "stale_weights"),
            e.both("top-p 0.9, lag 1", lag_1, lambda _w: plain(e.head(top_p=0.9))),
            ALL,
        ),
        kind(
            "int8_and_doubled_bos",
            ("precision", "prompt_difference"),
            e.both("int8 weights, BOS twice", int8, seen=e.with_bos, quantization="int8"),
        ),
        kind(
            "penalty_and_bf16",
            ("logit_processors", "precision"),
            e.both("presence penalty 0.3, bf16", bf16, lambda _w: e.presence(0.3), dtype="bfloat16"),
        ),
        kind("shift_and_stale", ("misalignment", "stale_weights"), _shift_and_stale, ALL),
    ]


def _shift_and_stale(world: World) -> Made:
    made = e.holds("lag 1, one token late", lambda w, _n: (e.version_of(w, 1), 1.0))(world)
    batch, scored = made.batch, world.score(made.batch)
    logps = batch.logps.copy()
    logps[:, 1:], logps[:, 0] = batch.logps[:, :-1], float("nan")
    return Made(made.fault, type(batch)(batch.prompt_ids, batch.ids, logps), scored)
