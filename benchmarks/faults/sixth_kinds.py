"""The sixth round of kinds. Kinds and answers were written before any of them was scored.

Their author did not see the rules of the attribution, its tests, or what it says of any kind. Two thirds are what users
of RL stacks report (README.md names threads), the others are small, hidden, two at once, or over time. Where no cause
of ``trl_offpolicy.diagnosis.causes`` stands for a fault, "unknown" is right.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import contexts
import engine_faults as e
import fifth_engine as k
import fourth_engine as h
import second_contexts as c
import second_engine as s
import sixth_contexts as u
import sixth_engine as j
import sixth_trainer as q
import third_engine as g
import third_trainer as z
import trainer_faults as t
from engine_faults import Inject
from kind import ALL, CLEAN, DENSE, OLDER, SMALL, Kind
from sampler import plain
from time_faults import RunFault
from torch import nn
from worlds import Made, World


def prompts() -> list[Kind]:
    def kind(name: str, inject: Inject, *sane: str, models: tuple[str, ...] = DENSE) -> Kind:
        return Kind(name, "prompts", ("prompt_difference",), inject, sane, models)

    asked = g.conversations(h.asked_with_system)
    return [
        kind("thoughts_begun_by_the_template", e.gets("the thoughts begun in the engine alone", j.opened_thoughts)),
        kind(
            "system_prompt_twice",
            s.mistaken("the system prompt twice in the engine", asked, g.conversations(j.system_twice)),
        ),
        kind(
            "roles_of_the_data_set",
            j.seen_on_both(
                "the role human in the engine, int8 on both sides",
                asked,
                g.conversations(j.asked_by_a_human),
                e.of_model(contexts.weights_rounded, contexts.int8),
                quantization="int8",
            ),
        ),
        kind(
            "tool_list_sorted_and_escaped",
            s.mistaken(
                "the tool's keys sorted and escaped in the engine",
                g.conversations(partial(j.asked_with_tool, tool=j.TOOL)),
                g.conversations(partial(j.asked_with_tool, tool=j.SORTED_TOOL)),
            ),
        ),
        kind("no_system_prompt_in_two_groups", k.tempered_and_seen(0.9, j.system_missing_in((1, 4)))),
        kind(
            "stop_string_lost_in_the_history",
            s.mistaken(
                "the engine's history lacks the string that ended the first response",
                g.conversations(partial(j.answered_before, ending="</answer>")),
                g.conversations(partial(j.answered_before, ending="")),
            ),
        ),
        kind(
            "image_in_front_of_the_text",
            s.mistaken(
                "the image in front of the text in the engine",
                partial(j.with_image, front=False),
                partial(j.with_image, front=True),
            ),
            models=ALL,
        ),
        kind("long_texts_cut_on_the_left", q.cut_on_the_left, models=ALL),
    ]


def sampling() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], inject: Inject, *sane: str, hidden: bool = False) -> Kind:
        return Kind(name, "sampling", right, inject, sane, ALL, hidden)

    processors = ("logit_processors",)
    return [
        kind(
            "settings_lost_at_a_resume",
            ("temperature",),
            e.draws(
                "temperature 0.6 from the 10th token on in every third row", lambda _w: j.settings_lost_at_a_resume(0.6)
            ),
        ),
        kind("top_k_of_two_sizes", ("truncated_sampling",), j.cut_on_both_sides(10, 40)),
        kind(
            "presence_penalty_beside_a_declared_temperature",
            processors,
            s.at(0.7, "presence penalty 1.5, temperature 0.7 on both sides", j.penalised_and_tempered(1.5, 0.7)),
        ),
        kind(
            "repetition_penalty_of_the_prompt_alone",
            processors,
            e.draws("repetition penalty 1.2 on the prompt's tokens", lambda _w: j.repetition_of_the_prompt(1.2)),
        ),
        kind(
            "everything_greedy",
            ("repeated_draws", "unreported_sampling"),
            e.draws("the likeliest token always", lambda _w: j.greedy),
            "temperature",
            hidden=True,
        ),
        kind(
            "drafts_accepted_above_a_threshold",
            ("unreported_sampling",),
            e.draws("sharper drafts accepted at a probability of 0.2", lambda _w: j.accepted_above(0.2, 0.5)),
            "temperature",
            "truncated_sampling",
            hidden=True,
        ),
        kind(
            "raw_logps_of_one_server",
            ("temperature", "unreported_sampling"),
            s.at(0.7, "raw log-probs in every second row at temperature 0.7", j.raw_in_every_second_row(0.7)),
        ),
    ]


def architecture() -> list[Kind]:
    def kind(name: str, inject: Inject, *sane: str, models: tuple[str, ...] = ALL) -> Kind:
        return Kind(name, "architecture", ("model_config",), inject, sane, models)

    m = e.of_model
    return [
        kind("rope_factors_of_long_texts", e.computes("LongRoPE's factors 1 to 4", m(u.long_factors))),
        kind(
            "one_rope_base_for_all_layers",
            t.scores_in(
                "every second layer has a fifth of the RoPE base, and the engine does not know it",
                m(u.rope_theta_in, 0.2, lambda number: number % 2 == 1),
            ),
        ),
        kind(
            "norms_of_q_and_k_over_all_heads",
            e.computes("norms of q and k over all heads", m(u.norms_over_all_heads)),
            models=SMALL,
        ),
        kind(
            "limit_of_the_gates_ignored",
            t.scores_in("the engine has no limit of 1 in its gates", m(u.gate_limited, 1.0)),
            models=("qwen",),
        ),
    ]


def precision() -> list[Kind]:
    def kind(name: str, inject: Inject, *sane: str, models: tuple[str, ...] = DENSE) -> Kind:
        return Kind(name, "precision", ("precision",), inject, sane, models)

    m = e.of_model
    return [
        kind("trainer_in_fp8", t.scores_in("a trainer in blockwise fp8", m(u.fp8_training), quantization="fp8")),
        kind(
            "kv_of_eight_and_four_bits",
            e.computes("keys in int8, values in int4", lambda _w: u.kv_of_eight_and_four_bits(), kv_cache="int4"),
            models=ALL,
        ),
        kind(
            "int4_in_groups_of_two_sizes",
            k.on_both(
                "int4 on both sides, groups of 32 in the engine and 64 in the trainer",
                m(u.int4_of_groups, 32),
                m(u.int4_of_groups, 64),
                {"quantization": "int4"},
            ),
        ),
        kind(
            "trainer_in_eight_bits",
            t.scores_in("the trainer's layers in LLM.int8", m(u.eight_bits_with_outliers)),
        ),
        kind(
            "activations_of_the_mlps_in_bf16",
            e.computes("what the non-linearities put out in bf16", m(u.activations_rounded, contexts.bf16)),
            models=ALL,
        ),
    ]


def bookkeeping() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], inject: Inject, *sane: str, hidden: bool = False) -> Kind:
        return Kind(name, "bookkeeping", right, inject, sane, ALL, hidden)

    wrong = ("misalignment",)
    return [
        kind("header_in_the_loss", ("tool_tokens",), q.header_in_the_loss, *wrong),
        kind("thoughts_cut_from_the_trained_text", ("prompt_difference",), q.without_the_thoughts, *wrong),
        kind("early_where_a_response_stopped", wrong, q.stop_not_listed),
        kind(
            "logps_behind_a_failed_request",
            wrong,
            t.reports("log-probs of the next row from row 13 on", q.one_request_failed),
        ),
        kind(
            "first_logp_missing",
            ("nonfinite",),
            t.reports("NaN for the first token", q.first_missing),
            "engine_logprobs_missing",
            hidden=True,
        ),
        kind(
            "rejected_drafts_in_the_list",
            wrong,
            t.reports("log-probs of rejected drafts in between", q.rejected_drafts_kept),
        ),
        kind(
            "prefix_listed_twice",
            wrong,
            t.reports("log-probs nine tokens late from the 10th on in every third row", q.prefix_twice),
        ),
    ]


def weights() -> list[Kind]:
    return [*_weights_that_did_not_arrive(), *_weights_of_others()]


def _of_weights(name: str, right: str, inject: Inject, *sane: str, models: tuple[str, ...] = ALL) -> Kind:
    return Kind(name, "weights", (right,), inject, sane, models)


def _weights_that_did_not_arrive() -> list[Kind]:
    def last_layer(world: World, name: str) -> bool:
        return e.layer_of(name) == len(world.model.model.layers) - 1

    kind, stale = _of_weights, "stale_weights"
    return [
        kind(
            "modules_saved_apart_not_sent",
            stale,
            e.stale_where("embedding, head and norms never sent", u.saved_apart, back=5),
            *OLDER,
            "wrong_adapter",
            models=SMALL,  # in the large one the tied embedding is all of it, which is an older kind
        ),
        kind(
            "first_rows_during_a_sync",
            stale,
            h.of_servers(
                "upper layers of lag 4 in the first five rows",
                [None, lambda world: u.upper_half_old(world, 4)],
                lambda row: int(row < 5),
            ),
            *OLDER,
        ),
        kind(
            "last_layer_one_version_behind",
            stale,
            e.stale_where("the last layer of lag 1", last_layer, back=1),
            *OLDER,
        ),
    ]


def _weights_of_others() -> list[Kind]:
    kind, adapter, other, stale = _of_weights, "wrong_adapter", "other_weights", "stale_weights"
    return [
        kind(
            "adapter_of_another_policy_in_two_groups",
            adapter,
            h.of_servers(
                "another adapter in groups 2 and 3",
                [None, lambda world: world.weights.at("other")],
                lambda row: int(8 <= row < 16),
            ),
            other,
        ),
        kind(
            "adapter_left_merged_in_the_trainer",
            adapter,
            t.scores_in(
                "the trainer's adapter counts twice", lambda world: world.weights.at(e.version_of(world, 0), 2.0)
            ),
            other,
        ),
        kind(
            "fused_projection_of_another_layout",
            other,
            k.on_both(
                "the last layer's q, k and v read in another order, bf16 on both sides",
                e.stack(e.cast("bfloat16"), u.fused_qkv_read_in_order),
                e.cast("bfloat16"),
                {"dtype": "bfloat16"},
            ),
            stale,
            "model_config",
            models=DENSE,
        ),
        kind(
            "rows_of_new_tokens_lost_in_the_head",
            other,
            e.computes("the head's rows of the end and the beginning reset", u.head_rows_lost),
            stale,
            "logit_processors",
        ),
    ]


def trainer() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], inject: Inject, *sane: str) -> Kind:
        return Kind(name, "trainer", right, inject, sane)

    def dropped(world: World) -> Any:
        return contexts.hooked([world.model.model.norm], lambda values: nn.functional.dropout(values, 0.1))

    return [
        kind("labels_shifted_twice", ("misalignment",), t.scores_by("labels shifted twice", q.labels_shifted_twice)),
        kind("dropout_before_the_head", ("dropout",), t.scores_in("dropout 0.1 before the head", dropped)),
        kind(
            "first_token_masked",
            ("padding",),
            t.scores_by("the mask hides the first token of a prompt", q.first_token_masked),
            "prompt_difference",
        ),
        kind(
            "trainers_vocabulary_padded",
            ("model_config",),
            t.scores_by(
                "padding of the vocabulary counts in the trainer's softmax",
                z.rescored(q.of_a_padded_vocabulary(0.05)),
            ),
            "unknown",
        ),
        kind("multiplied_by_the_temperature", ("temperature",), q.multiplied_by_the_temperature(0.8)),
    ]


def routing() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], inject: Inject, *sane: str) -> Kind:
        return Kind(name, "routing", right, inject, sane, ("moe",))

    m = e.of_model
    return [
        kind(
            "replay_of_the_next_request",
            ("routing",),
            q.replayed_of_the_next_request,
            "misalignment",
        ),
        kind(
            "routers_sent_in_bf16",
            ("routing", "precision"),
            e.computes("weights of the routers in bf16", m(u.routers_rounded, contexts.bf16)),
            "sync_rounding",
        ),
        kind(
            "map_of_experts_out_of_date",
            ("routing", "other_weights"),
            e.computes("the last layer's experts moved by one", u.map_of_the_last_rebalance),
            "stale_weights",
            "model_config",
        ),
        kind(
            "scores_on_the_experts_input",
            ("model_config",),
            e.computes("scores multiply the input of the experts", m(u.experts_called, u.scores_on_the_input)),
            "routing",
        ),
    ]


def mixtures() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], inject: Inject, *sane: str, models: tuple[str, ...] = ALL) -> Kind:
        return Kind(name, "mixtures", right, inject, sane, models)

    fp8 = e.of_model(contexts.weights_rounded, contexts.fp8)

    def unsent(world: World) -> Any:
        return world.weights.holding(lambda name: (0 if u.saved_apart(world, name) else e.version_of(world, 0), 1.0))

    return [
        kind(
            "begun_thoughts_and_bf16",
            ("prompt_difference", "precision"),
            j.seen_and_inside(
                "the thoughts begun in the engine, bf16", j.opened_thoughts, e.cast("bfloat16"), dtype="bfloat16"
            ),
            models=DENSE,
        ),
        kind("lag_and_a_failed_request", ("misalignment", "stale_weights"), q.lagging_after_a_failure(3), *OLDER),
        kind(
            "declared_top_k_and_unsent_modules",
            ("truncated_sampling", "stale_weights"),
            e.both(
                "top-k 20, declared by the engine; embedding, head and norms never sent",
                unsent,
                lambda _w: plain(e.head(top_k=20)),
                top_k=20,
            ),
            *OLDER,
        ),
        kind(
            "same_fp8_and_another_adapter",
            ("wrong_adapter",),
            k.on_both(
                "fp8 on both sides, another adapter in the engine",
                e.stack(lambda world: world.weights.at("other"), fp8),
                fp8,
                {"quantization": "fp8"},
            ),
            "other_weights",
            models=DENSE,
        ),
        kind(
            "known_lag_and_a_second_system_prompt",
            ("policy_staleness", "prompt_difference"),
            _lagging_and_asked_twice,
            "stale_weights",
            "other_weights",
            models=DENSE,
        ),
    ]


def _lagging_and_asked_twice(world: World) -> Made:
    """The engine is two versions behind and says so, and its prompts have the system prompt twice."""
    made = e.both(
        "lag 2, declared, and the system prompt twice",
        lambda w: w.weights.at(e.version_of(w, 2)),
        seen=g.conversations(j.system_twice),
        weight_version=3,
    )(world)
    return made


def over_time() -> list[Kind]:
    def kind(
        name: str, right: tuple[str, ...], run: RunFault, *sane: str, models: tuple[str, ...] = SMALL,
        hidden: bool = False,
    ) -> Kind:  # fmt: skip
        return Kind(name, "time", right, None, sane, models, hidden, run)

    return [
        kind(
            "adapter_scale_lost_at_a_resume",
            ("wrong_adapter",),
            RunFault("half of the update from step 7 on", inside=u.half_an_adapter_later),
            *OLDER,
            "stale_weights",
        ),
        kind(
            "weights_updated_in_flight",
            ("policy_staleness", "stale_weights"),
            RunFault(
                "the first half of each response with weights three steps old",
                inside=partial(u.updated_in_flight, back=3, tokens=10),
            ),
            "other_weights",
        ),
        kind(
            "first_group_prefetched",
            ("policy_staleness", "stale_weights"),
            RunFault("the first group with weights three steps old", change=q.first_group_prefetched),
            "other_weights",
        ),
        kind(
            "routers_in_bf16_after_an_upgrade",
            ("routing",),
            RunFault("routers in bf16 from step 6 on", inside=u.routers_in_bf16_later),
            "precision",
            models=("moe",),
        ),
        kind(
            "next_turn_in_the_loss_after_an_upgrade",
            ("tool_tokens",),
            RunFault("five tokens of another prompt in the loss from step 6 on", change=q.next_turn_later),
            "misalignment",
        ),
        kind(
            "greedy_after_an_evaluation",
            ("repeated_draws", "unreported_sampling"),
            RunFault("the likeliest token from step 10 on", drawing=q.greedy_later),
            "temperature",
            hidden=True,
        ),
    ]


def clean() -> list[Kind]:
    def kind(name: str, inject: Inject, models: tuple[str, ...] = ALL) -> Kind:
        return Kind(name, CLEAN, ("none",), inject, (), models)

    def capped(world: World) -> Any:
        return contexts.logits_changed(world.model, lambda logits: contexts.softcapped(logits, 20.0))

    begun = j.opened_thoughts
    return [
        kind("clean_long_responses", j.long_responses),
        kind("clean_trainer_with_a_cache", t.scores_by("prompts in a cache, responses then", q.with_a_cache)),
        kind("clean_merged_and_unmerged", e.computes("the update taken out and added again", u.merged_and_unmerged)),
        kind("clean_same_cap_of_the_logits", k.on_both("logits capped at 20 on both sides", capped, capped)),
        kind("clean_begun_thoughts", s.mistaken("the thoughts begun on both sides", begun, begun), DENSE),
        kind("clean_update_of_zero", j.update_of_zero),
        kind("clean_top_k_of_all", j.top_k_of_all),
        kind(
            "clean_router_in_float64",
            e.computes("routers that decide in float64", e.of_model(c.routed, u.router_in_float64)),
            ("moe",),
        ),
    ]
