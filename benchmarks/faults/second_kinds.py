"""The second round of kinds. Kinds and answers were committed before any of them was scored.

Each is a report of users of RL stacks, or follows from one; README.md names threads. Large, small, and hidden ones are
mixed on purpose. Where no cause of ``trl_offpolicy.diagnosis.causes`` stands for a fault, "unknown" is right.
"""

from __future__ import annotations

from functools import partial

import contexts
import engine_faults as e
import second_contexts as c
import second_engine as s
import second_trainer as y
import torch
import trainer_faults as t
from engine_faults import Inject
from kind import ALL, CLEAN, DENSE, OLDER, SMALL, Kind
from sampler import plain, processed, speculated
from time_faults import RunFault
from worlds import LENGTH, Made, World


def prompts() -> list[Kind]:
    def kind(name: str, inject: Inject, *sane: str, models: tuple[str, ...] = DENSE) -> Kind:
        return Kind(name, "prompts", ("prompt_difference",), inject, sane, models)

    dumped, shown = '{"result": 42.0, "unit": null, "ok": true}', "{'result': 42.0, 'unit': None, 'ok': True}"
    return [
        kind(
            "thinking_of_the_last_turn_removed",
            s.mistaken(
                "the engine's template drops earlier thinking",
                s.after_a_turn(thinking=True),
                s.after_a_turn(thinking=False),
            ),
        ),
        kind(
            "tool_result_as_python",
            s.mistaken("a tool's JSON rendered as Python prints it", s.after_a_tool(dumped), s.after_a_tool(shown)),
        ),
        kind(
            "image_not_expanded",
            s.mistaken("one token for an image in place of 16", s.with_image(16), s.with_image(1)),
            models=ALL,
        ),
        kind("special_tokens_as_text", e.gets("special tokens written as text", s.special_as_text)),
        kind("padding_sent_to_the_engine", e.gets("the engine reads padding", s.with_padding), "padding", models=ALL),
        kind(
            "trainer_cuts_long_prompts",
            t.sees("the end of long prompts cut in the trainer", s.cut_right_where_long),
            models=ALL,
        ),
    ]


def sampling() -> list[Kind]:
    def kind(
        name: str,
        right: tuple[str, ...],
        inject: Inject,
        *sane: str,
        models: tuple[str, ...] = ALL,
        hidden: bool = False,
    ) -> Kind:
        return Kind(name, "sampling", right, inject, sane, models, hidden)

    cut, processors, unreported = ("truncated_sampling",), ("logit_processors",), ("unreported_sampling",)
    return [
        kind(
            "top_p_before_temperature",
            cut,
            s.at(1.3, "top-p 0.9, then temperature 1.3", s.cut_then_tempered(0.9, 1.3), top_p=0.9),
        ),
        kind("typical_sampling", cut, e.draws("typical-p 0.9", lambda _w: s.typical(0.9)), *processors),
        kind("no_repeated_ngram", processors, e.draws("no bigram twice", lambda _w: s.no_repeated(2)), *cut),
        kind("forced_at_a_budget", (*processors, "tool_tokens"), e.draws("three tokens forced", s.budget), *cut),
        kind(
            "first_token_suppressed",
            processors,
            e.draws("the likeliest first token suppressed", lambda _w: processed(s.first_suppressed)),
            *cut,
        ),
        kind(
            "ending_favoured",
            processors,
            e.draws("the end likelier with every token", lambda w: s.ending_favoured(w, 1.08, 4)),
        ),
        kind(
            "temperature_by_member",
            ("temperature",),
            e.draws("temperatures 0.8, 0.95, 1.1, 1.25 in a group", lambda _w: s.spread([0.8, 0.95, 1.1, 1.25])),
        ),
        kind(
            "one_greedy_completion",
            unreported,
            e.draws("one of four completions is greedy", lambda _w: s.one_greedy),
            "temperature",
            hidden=True,
        ),
        kind(
            "raw_logps_under_penalty",
            unreported,
            e.draws("raw log-probs under repetition penalty 1.3", lambda _w: s.raw_under_penalty(1.3)),
            *processors,
            hidden=True,
        ),
    ]


def architecture() -> list[Kind]:
    def kind(name: str, inject: Inject, *sane: str, models: tuple[str, ...] = ALL) -> Kind:
        return Kind(name, "architecture", ("model_config",), inject, sane, models)

    m = e.of_model
    return [
        kind("residual_multiplier", e.computes("branches 0.95 times", m(c.branches_scaled, 0.95))),
        kind(
            "logit_multiplier",
            e.computes("logits 0.9375 times", m(contexts.logits_changed, lambda x: 0.9375 * x)),
            "temperature",
        ),
        kind("decoded_positions_off_by_one", e.computes("decoded tokens one place too far", m(c.decoded_one_further))),
        kind("yarn", e.computes("YaRN with factor 4", m(c.yarn))),
        kind(
            "window_in_every_second_layer",
            e.computes(
                "window of 12 tokens in every second layer",
                lambda _w: contexts.attention_logits(window=12, layers=lambda number: number % 2 == 0),
            ),
        ),
        kind(
            "key_heads_in_other_order",
            e.computes("heads of keys tiled, not repeated", lambda _w: contexts.attention_logits(tiled=True)),
            models=DENSE,
        ),
        kind("attention_sink", e.computes("a sink in the attention", lambda _w: contexts.attention_logits(sink=True))),
    ]


def precision() -> list[Kind]:
    def kind(name: str, inject: Inject, *sane: str, models: tuple[str, ...] = ALL, more: tuple[str, ...] = ()) -> Kind:
        return Kind(name, "precision", ("precision", *more), inject, sane, models)

    m, kv, weights = e.of_model, contexts.kv_rounded, contexts.weights_rounded
    old = partial(c.fp8_of_old_scale, share=0.5)
    return [
        kind(
            "fp8_weights_with_old_scale",
            e.computes("fp8 weights, scale of half the range", m(weights, old), quantization="fp8"),
            models=DENSE,
        ),
        kind(
            "kv_fp8_with_old_scale", e.computes("fp8 KV, scale of half the range", lambda _w: kv(old), kv_cache="fp8")
        ),
        kind(
            "kv_int4_in_upper_layers",
            e.computes("KV in int4 in the upper half", lambda w: kv(c.int4_rows, lambda n: n >= e.middle_layer(w))),
        ),
        kind("residual_in_bf16", e.computes("residual stream in bf16", m(c.residual_rounded))),
        kind(
            "partial_sums_in_bf16",
            e.computes("two ranks add in bf16", m(c.partial_sums, contexts.bf16)),
            more=("parallelism",),
        ),
        kind(
            "int4_in_the_mlps",
            e.computes("int4 in the MLPs", m(c.mlps_rounded, contexts.int4_groups), quantization="int4"),
            models=DENSE,
        ),
        kind("mxfp4_weights", e.computes("weights in MXFP4", m(weights, c.mxfp4), quantization="mxfp4"), models=DENSE),
        kind("tf32", e.computes("products in TF32", m(c.tf32_products))),
        kind("trainer_in_nf4", t.scores_in("the trainer's base in NF4", m(weights, c.nf4)), models=DENSE),
        kind(
            "trainer_under_autocast",
            t.scores_in("the trainer under autocast", lambda _w: torch.autocast("cpu", torch.bfloat16)),
            models=DENSE,
        ),
    ]


def bookkeeping() -> list[Kind]:
    right = ("misalignment",)

    def kind(name: str, inject: Inject, *sane: str, more: tuple[str, ...] = ()) -> Kind:
        return Kind(name, "bookkeeping", (*right, *more), inject, sane)

    return [
        kind("zero_outside_the_top", t.reports("0 for tokens outside of the top 5", y.zero_outside_top)),
        kind("logps_in_bf16", t.reports("log-probs rounded to bf16", y.rounded_bf16), "unknown", more=("precision",)),
        kind("flat_list_cut_wrongly", t.reports("row r begins r tokens early", y.drifting)),
        kind(
            "prompt_logps_first", t.reports("the prompt's log-probs come first", y.prompts_first), "prompt_difference"
        ),
        kind("stream_loses_a_logp", t.reports("every eighth log-prob lost", y.chunks_cut)),
        kind(
            "logits_reported",
            e.draws("logits in place of log-probs", lambda _w: s.reporting_logits),
            "unreported_sampling",
        ),
        kind("rows_tiled", t.reports("rows in the other order", y.tiled)),
        kind("first_of_the_group_for_all", t.reports("the first row's log-probs for its group", y.first_of_group)),
        kind("last_logp_zero", t.reports("0 for the last token", y.last_zero)),
        kind(
            "logps_divided_by_temperature",
            s.at(0.7, "raw log-probs divided by 0.7", s.divided_report(0.7)),
            "temperature",
            "unreported_sampling",
        ),
    ]


def weights() -> list[Kind]:
    other, stale = ("other_weights",), ("stale_weights",)

    def kind(name: str, right: tuple[str, ...], inject: Inject, *sane: str, models: tuple[str, ...] = ALL) -> Kind:
        return Kind(name, "weights", right, inject, sane, models)

    def special(world: World) -> object:
        if world.task is None:
            raise ValueError("rows_lost needs a tokenizer.")
        return c.rows_lost(world, world.task.tokenizer.all_special_ids)

    return [
        kind(
            "first_shard_alone",
            stale,
            e.computes("half of each matrix is 4 behind", lambda w: c.first_shard_new(w, 4)),
            *OLDER,
        ),
        kind(
            "adapter_one_layer_up",
            ("wrong_adapter",),
            e.computes("each layer has the update of the one below", c.updates_one_layer_up),
            *other,
            *stale,
        ),
        kind(
            "ema_weights",
            (*other, *stale),
            e.computes("the mean of all versions", lambda w: c.averaged_versions(w, 0.7)),
            "policy_staleness",
            "wrong_adapter",
        ),
        kind(
            "sync_in_mid_generation",
            ("stale_weights", "policy_staleness"),
            e.computes("lag 4 in the first half of each completion", lambda w: c.synced_on_the_way(w, 4, LENGTH // 2)),
            "other_weights",
        ),
        kind(
            "special_rows_lost",
            other,
            e.computes("special tokens' rows reset", special),
            *stale,
            models=DENSE,
        ),
        kind("transposed_weight", other, e.computes("a matrix transposed", c.transposed), *stale),
        kind(
            "gate_and_up_swapped",
            other,
            e.computes("gate and up of a layer swapped", c.gate_and_up_swapped),
            *stale,
            models=DENSE,
        ),
        kind(
            "experts_swapped",
            other,
            e.computes("two experts swapped in each layer", c.first_experts_swapped),
            *stale,
            "routing",
            models=("moe",),
        ),
        kind(
            "adapter_of_two_versions",
            ("stale_weights", "wrong_adapter"),
            e.computes("LoRA's B three versions old", lambda w: c.factors_of_two_versions(w, 3)),
            *OLDER,
            models=("smollm2",),
        ),
    ]


def trainer() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], inject: Inject, *sane: str) -> Kind:
        return Kind(name, "trainer", right, inject, sane)

    return [
        kind(
            "embedding_dropout", ("dropout",), t.scores_in("dropout 0.1 behind the embedding", y.embedding_dropout(0.1))
        ),
        kind("labels_not_shifted", ("misalignment",), t.scores_by("logits of the token's own place", y.unshifted)),
        kind(
            "sequence_parts_do_not_see_each_other",
            ("unknown",),
            t.scores_by("four parts of a sequence without exchange", partial(y.split_in, 4)),
            "prompt_difference",
            "model_config",
            "padding",
            "parallelism",
        ),
        kind("temperature_applied_twice", ("temperature",), y.tempered_twice(0.8)),
    ]


def routing() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], inject: Inject, *sane: str) -> Kind:
        return Kind(name, "routing", right, inject, sane, ("moe",))

    m = e.of_model
    return [
        kind(
            "router_scores_normalised",
            ("model_config",),
            e.computes("scores of the chosen experts sum to 1", m(c.routed, c.renormalised)),
            "routing",
        ),
        kind(
            "experts_over_capacity",
            ("routing",),
            t.scores_in("tokens over an expert's capacity dropped", m(c.routed, c.over_capacity_dropped(1.0))),
            "model_config",
        ),
        kind(
            "replay_off_by_one",
            ("routing",),
            t.scores_in("experts of the token before", m(c.routed, c.replayed_late)),
            "misalignment",
        ),
        kind(
            "router_jitter", ("routing", "dropout"), t.scores_in("router's input jittered by 2 %", m(c.jittered, 0.02))
        ),
    ]


def mixtures() -> list[Kind]:
    def kind(name: str, right: tuple[str, str], inject: Inject, models: tuple[str, ...] = ALL) -> Kind:
        return Kind(name, "mixtures", right, inject, (), models)

    int8, old = e.of_model(contexts.weights_rounded, contexts.int8), lambda w: w.weights.at(e.version_of(w, 3))
    return [
        kind(
            "int8_of_older_weights",
            ("precision", "stale_weights"),
            e.computes("int8 of the weights of lag 3", e.stack(old, int8), quantization="int8"),
            DENSE,
        ),
        kind(
            "fp16_and_min_p",
            ("precision", "truncated_sampling"),
            e.both(
                "fp16, min-p 0.05", e.cast("float16"), lambda _w: plain(e.head(min_p=0.05)), dtype="float16", min_p=0.05
            ),
            DENSE,
        ),
        kind(
            "dropout_and_stale",
            ("dropout", "stale_weights"),
            y.lagging_engine_and(2, "lag 2, dropout behind the embedding", y.embedding_dropout(0.05)),
        ),
        kind(
            "padding_sent_and_temperature",
            ("prompt_difference", "temperature"),
            e.both("temperature 0.85, padding sent", None, lambda _w: plain(e.head(0.85)), s.with_padding),
        ),
        kind("rows_tiled_and_bf16", ("misalignment", "precision"), y.tiled_in_bf16, DENSE),
    ]


def over_time() -> list[Kind]:
    def kind(name: str, right: str, run: RunFault, *sane: str) -> Kind:
        return Kind(name, "time", (right,), None, sane, SMALL, run=run)

    return [
        kind(
            "one_of_two_replicas_stale",
            "stale_weights",
            RunFault("every second row of an old replica", change=y.second_replica),
            *OLDER,
        ),
        kind(
            "first_weights_after_a_restart",
            "stale_weights",
            RunFault("the first weights in steps 6 to 10", y.restarted),
            *OLDER,
        ),
        kind(
            "queue_emptied_at_times",
            "policy_staleness",
            RunFault("lag 0 to 3, known", y.sawtooth, known=True),
            "stale_weights",
            "other_weights",
        ),
        kind(
            "penalty_after_a_restart",
            "logit_processors",
            RunFault("a repetition penalty from step 10", drawing=y.penalty_later),
        ),
        kind(
            "rows_tiled_in_every_third_step",
            "misalignment",
            RunFault("rows in the other order at times", change=y.tiled_at_times),
        ),
        kind(
            "training_mode_after_an_evaluation",
            "dropout",
            RunFault("attention dropout from step 5", change=y.left_in_training),
        ),
    ]


def clean() -> list[Kind]:
    def kind(name: str, inject: Inject, models: tuple[str, ...] = ALL) -> Kind:
        return Kind(name, CLEAN, ("none",), inject, (), models)

    def same(values: torch.Tensor) -> torch.Tensor:
        return values

    return [
        kind("clean_packed_positions", t.scores_by("positions begin at 37", y.positions_go_on(37))),
        kind("clean_eager_attention", e.computes("attention without SDPA", lambda _w: contexts.attention_logits())),
        kind("clean_partial_sums", e.computes("two ranks add in float32", e.of_model(c.partial_sums, same))),
        kind("clean_masked_padding", e.draws("padding of the vocabulary masked", s.masked_padding)),
        kind(
            "clean_exact_speculation",
            e.draws("speculation that is exact", lambda _w: speculated(flatness=1.8, leniency=1.0)),
        ),
        kind("clean_same_temperature", y.same_head(e.head(0.7), temperature=0.7)),
        kind("clean_same_top_p", y.same_head(e.head(top_p=0.9), top_p=0.9)),
        kind("clean_short", lambda world: Made("completions of four tokens", world.sample(length=4))),
        kind("clean_int8_on_both_sides", y.same_int8, DENSE),
    ]
