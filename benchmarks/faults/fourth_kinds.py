"""The fourth round of kinds. Kinds and answers were written before any of them was scored.

Their author did not see the rules of the attribution, its tests, or what it says of any kind. Most kinds are reports of
users of RL stacks; README.md names threads. Ordinary faults and odd ones, large, small and hidden ones are mixed. Where
no cause of ``trl_offpolicy.diagnosis.causes`` stands for a fault, "unknown" is right.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import contexts
import engine_faults as e
import fourth_contexts as v
import fourth_engine as h
import fourth_trainer as u
import second_contexts as c
import second_engine as s
import third_contexts as x
import third_engine as g
import trainer_faults as t
from engine_faults import Inject
from kind import ALL, CLEAN, DENSE, OLDER, SMALL, Kind
from sampler import plain, reporting_raw
from time_faults import RunFault
from worlds import World


def prompts() -> list[Kind]:
    def kind(name: str, inject: Inject, models: tuple[str, ...] = DENSE) -> Kind:
        return Kind(name, "prompts", ("prompt_difference",), inject, (), models)

    turn, alone = g.conversations(g.said_before), g.conversations(h.asked)
    return [
        kind("bos_missing_in_the_engine", e.gets("the engine lacks the first token", h.without_first), ALL),
        kind("generation_prompt_twice", e.gets("the assistant's header twice", h.assistant_twice)),
        kind(
            "tools_turn_missing_in_the_trainer",
            s.mistaken(
                "a turn that lists the tools, in the engine alone",
                g.conversations(h.asked_with_system),
                g.conversations(h.asked_with_tools),
            ),
        ),
        kind(
            "system_folded_into_the_user_turn",
            s.mistaken(
                "the system prompt within the user's turn",
                g.conversations(h.asked_with_system),
                g.conversations(h.system_in_the_user_turn),
            ),
        ),
        kind(
            "end_of_turn_twice",
            s.mistaken("the first response ends twice", turn, g.conversations(g.said_before, h.end_of_turn_twice)),
        ),
        kind("oldest_turns_dropped", s.mistaken("the engine forgets the first turn", turn, alone)),
        kind("blanks_stripped", s.mistaken("blanks behind the question", g.conversations(h.asked_with_blanks), alone)),
    ]


def sampling() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], inject: Inject, *sane: str, hidden: bool = False) -> Kind:
        return Kind(name, "sampling", right, inject, sane, ALL, hidden)

    return [
        kind(
            "evaluation_settings_in_two_groups",
            ("temperature", "truncated_sampling"),
            e.draws(
                "temperature 0.6 and top-p 0.95 in two of six groups",
                lambda _w: g.by_row(lambda row: 8 <= row < 16, plain(e.head(0.6, top_p=0.95))),
            ),
        ),
        kind(
            "top_p_behind_the_thoughts",
            ("truncated_sampling",),
            e.draws("top-p 0.8 from the 13th token on", lambda _w: h.top_p_late()),
        ),
        kind("top_p_of_another_kernel", ("truncated_sampling",), h.same_head_narrow(0.9)),
        kind(
            "raw_logps_beside_a_tempered_trainer",
            ("temperature", "unreported_sampling"),
            s.at(0.7, "raw log-probs, the trainer at temperature 0.7", reporting_raw(e.head(0.7))),
        ),
        kind(
            "temperature_lost_on_the_second_server",
            ("temperature",),
            s.at(
                0.8, "temperature 1 in the second half of the rows", g.by_row(lambda row: row < 12, plain(e.head(0.8)))
            ),
        ),
        kind(
            "first_token_of_the_prefill_node",
            ("temperature",),
            e.draws("the first token at temperature 0.5", lambda _w: h.first_token_cool()),
            "logit_processors",
        ),
        kind(
            "one_seed_for_all_requests",
            ("repeated_draws",),
            e.draws("the same random numbers in a group", lambda _w: h.one_seed),
            hidden=True,
        ),
        kind(
            "watermark",
            ("logit_processors",),
            e.draws("a watermark of strength 1.5", lambda _w: h.watermarked(1.5)),
        ),
    ]


def architecture() -> list[Kind]:
    def kind(name: str, inject: Inject, *sane: str, models: tuple[str, ...] = ALL, more: tuple[str, ...] = ()) -> Kind:
        return Kind(name, "architecture", ("model_config", *more), inject, sane, models)

    return [
        kind(
            "head_tied_by_the_engine",
            e.computes("the embedding as head", e.of_model(v.head_tied)),
            "stale_weights",
            models=SMALL,
            more=("other_weights",),
        ),
        kind(
            "attention_in_chunks",
            e.computes("attention within blocks of 16 tokens", lambda _w: v.in_chunks(16)),
            "compressed_cache",
        ),
        kind(
            "attention_grows_with_the_place",
            e.computes("queries grow with their place", lambda _w: v.sharpened_by_place(0.1, 8)),
        ),
        kind(
            "rotary_missing_in_one_layer",
            e.computes(
                "no rotary embedding in one layer", lambda w: v.layer_without_rotary(w.model, e.middle_layer(w))
            ),
        ),
    ]


def precision() -> list[Kind]:
    def kind(
        name: str, inject: Inject, *sane: str, models: tuple[str, ...] = DENSE, more: tuple[str, ...] = ()
    ) -> Kind:
        return Kind(name, "precision", ("precision", *more), inject, sane, models)

    m = e.of_model
    return [
        kind(
            "attention_scores_in_bf16",
            e.computes("attention scores in bf16", lambda _w: v.scores_rounded(contexts.bf16)),
            models=ALL,
        ),
        kind("adapter_in_bf16", e.computes("the update computed apart in bf16", v.adapter_rounded), "sync_rounding"),
        kind("adapter_merged_into_nf4", u.on_the_same_nf4, "other_weights", "stale_weights", more=("sync_rounding",)),
        kind(
            "gptq_formats_mixed",
            e.computes("int4, one matrix with wrong offsets", m(v.gptq_formats_mixed), quantization="int4"),
            "stale_weights",
            more=("other_weights",),
        ),
        kind(
            "nvfp4_weights_and_inputs",
            e.computes("weights and inputs in NVFP4", m(v.nvfp4_products), quantization="nvfp4"),
        ),
        kind(
            "trainer_fused_head_in_bf16",
            t.scores_in("the trainer's head and its input in bf16", m(v.fused_head_in_bf16)),
            models=ALL,
        ),
        kind(
            "one_replica_in_fp8",
            h.of_servers(
                "fp8 in every second row", [None, m(contexts.weights_rounded, contexts.fp8)], lambda row: row % 2
            ),
        ),
    ]


def bookkeeping() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], inject: Inject, *sane: str, hidden: bool = False) -> Kind:
        return Kind(name, "bookkeeping", right, inject, sane, ALL, hidden)

    wrong = ("misalignment",)
    return [
        kind("losses_reported", wrong, t.reports("minus the log-probs", lambda _w, logps: -logps)),
        kind("one_logp_for_each_step", wrong, t.reports("one log-prob for up to three tokens", u.of_steps)),
        kind(
            "logps_lost_at_an_abort",
            ("tool_tokens", *wrong),
            t.reports("0 for the first tokens of one row in three", u.lost_at_an_abort),
            "engine_logprobs_missing",
        ),
        kind(
            "all_logps_zero",
            ("engine_logprobs_missing", *wrong),
            t.reports("0 for every token", u.zeros),
            "tool_tokens",
        ),
        kind(
            "some_rows_are_nan",
            ("nonfinite", "engine_logprobs_missing"),
            t.reports("NaN in three rows", u.some_rows_nan),
            hidden=True,
        ),
        kind("padding_in_the_loss", ("tool_tokens",), u.padding_in_the_loss, "padding", *wrong),
        kind("cut_on_two_sides", wrong, u.cut_on_two_sides, "prompt_difference"),
        kind(
            "trainer_logps_in_both_columns",
            ("unreported_sampling",),
            u.copied_from_the_trainer,
            "other_weights",
            "wrong_adapter",
            hidden=True,
        ),
    ]


def weights() -> list[Kind]:
    adapter, other, stale = ("wrong_adapter",), ("other_weights",), ("stale_weights",)

    def kind(name: str, right: tuple[str, ...], inject: Inject, *sane: str, models: tuple[str, ...] = ALL) -> Kind:
        return Kind(name, "weights", right, inject, sane, models)

    def version(back: float) -> e.Context:
        return lambda world: world.weights.at(e.version_of(world, back))

    return [
        kind(
            "merges_pile_up", (*adapter, *other), e.computes("every version's update added", v.merges_pile_up), *stale
        ),
        kind("matrix_left_at_dummy_values", other, e.computes("a matrix never loaded", v.left_at_dummy_values), *stale),
        kind(
            "rotary_buffer_lost_in_sleep",
            (*other, "model_config"),
            e.computes("all frequencies 0", e.of_model(v.rotary_buffer_lost)),
        ),
        kind(
            "magnitudes_of_dora_ignored",
            adapter,
            e.computes("rows with the base's lengths", v.magnitudes_ignored),
            *OLDER,
            *stale,
            models=DENSE,
        ),
        kind(
            "adapter_missing_in_a_quarter",
            (*adapter, *stale),  # the base is both the first version and no adapter
            h.of_servers("no adapter in one of four rows", [None, version(5)], lambda row: int(row % 4 == 3)),
            *OLDER,
        ),
        kind(
            "rows_of_three_versions",
            (*stale, "policy_staleness"),
            h.of_servers("rows of lag 0, 2 and 4", [None, version(2), version(4)], lambda row: row % 3),
            *other,
        ),
    ]


def trainer() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], inject: Inject, *sane: str, models: tuple[str, ...] = ALL) -> Kind:
        return Kind(name, "trainer", right, inject, sane, models)

    drop = e.of_model(contexts.attention_dropout, 0.1)
    return [
        kind(
            "padding_between_prompt_and_response",
            ("padding",),
            t.scores_by("positions count the padding behind the prompt", u.padded_in_the_middle(counted=True)),
            "model_config",
        ),
        kind("pad_id_masked_in_the_text", ("padding",), u.pad_id_masked, "prompt_difference", models=DENSE),
        kind(
            "micro_batches_not_put_back",
            ("misalignment",),
            t.scores_by("the trainer's rows in the order of their length", u.sorted_by_length(put_back=False)),
        ),
        kind(
            "labels_rolled_within_shards",
            ("misalignment", "parallelism"),
            t.scores_by("the last place of each quarter scored on another token", u.labels_within_shards(4)),
        ),
        kind("dropout_in_the_second_half", ("dropout",), u.from_row(12, "attention dropout from row 12 on", drop)),
        kind("temperature_missing_in_a_micro_batch", ("temperature",), u.untempered_from_row(16, 0.7)),
    ]


def routing() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], inject: Inject, *sane: str) -> Kind:
        return Kind(name, "routing", right, inject, sane, ("moe",))

    return [
        kind(
            "replay_of_the_layer_before",
            ("routing",),
            t.scores_in("experts of the layer before", e.of_model(v.replayed_from_the_layer_before)),
            "misalignment",
        ),
        kind(
            "replay_lacks_cached_prompts",
            ("routing",),
            t.scores_by("experts 0 and 1 for the first tokens of a prompt", u.cached_prompts_not_replayed),
        ),
        kind(
            "sigmoid_router",
            ("model_config",),
            e.computes("a sigmoid in the routers", e.of_model(c.routed, v.sigmoid_scores)),
            "routing",
        ),
    ]


def mixtures() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], inject: Inject, models: tuple[str, ...] = ALL) -> Kind:
        return Kind(name, "mixtures", right, inject, (), models)

    def old(world: World) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = world.weights.at(e.version_of(world, 3))
        return found

    folded = g.conversations(h.system_in_the_user_turn)
    bf16 = e.cast("bfloat16")
    return [
        kind(
            "stale_and_evaluation_settings",
            ("stale_weights", "temperature"),
            e.both(
                "lag 3, temperature 0.5 in every third row",
                old,
                lambda _w: g.by_row(lambda row: row % 3 == 0, plain(e.head(0.5))),
            ),
        ),
        kind(
            "folded_system_and_top_p",
            ("prompt_difference", "truncated_sampling"),
            e.both("the system prompt folded, top-p 0.9", None, lambda _w: plain(e.head(top_p=0.9)), folded),
            DENSE,
        ),
        kind(
            "base_in_half_and_bf16",
            ("wrong_adapter", "stale_weights", "precision"),
            h.of_servers(
                "bf16, no adapter in every second row",
                [bf16, e.stack(lambda w: w.weights.at(0), bf16)],
                lambda row: row % 2,
            ),
            DENSE,
        ),
        kind(
            "sigmoid_router_and_fp8_experts",
            ("model_config", "precision"),
            e.computes(
                "a sigmoid in the routers, experts in fp8",
                e.stack(e.of_model(c.routed, v.sigmoid_scores), e.of_model(x.experts_rounded, contexts.fp8)),
                quantization="fp8",
            ),
            ("moe",),
        ),
    ]


def over_time() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], run: RunFault, *sane: str, models: tuple[str, ...] = SMALL) -> Kind:
        return Kind(name, "time", right, None, sane, models, run=run)

    return [
        kind(
            "temperature_schedule_in_the_engine_alone",
            ("temperature",),
            RunFault("temperature from 1.25 to 0.85", drawing=u.cooling_run),
        ),
        kind(
            "evaluated_adapter_left_loaded",
            ("wrong_adapter",),
            RunFault("another adapter in every fourth step", inside=u.evaluated_adapter),
            "other_weights",
        ),
        kind(
            "layers_synced_in_turn",
            ("stale_weights",),
            RunFault("a sync sends one layer in four", inside=u.layers_in_turn),
            *OLDER,
        ),
        kind(
            "template_updated_in_the_engine",
            ("prompt_difference",),
            RunFault("a longer system prompt from step 7 on", change=u.template_updated),
            models=("qwen",),
        ),
        kind(
            "logps_lost_for_three_steps",
            ("engine_logprobs_missing", "misalignment"),
            RunFault("log-probs are 0 in steps 6 to 8", change=u.logps_lost),
            "tool_tokens",
        ),
    ]


def clean() -> list[Kind]:
    def kind(name: str, inject: Inject, models: tuple[str, ...] = ALL) -> Kind:
        return Kind(name, CLEAN, ("none",), inject, (), models)

    turn = g.conversations(g.said_before)
    return [
        kind("clean_packed_apart", t.scores_by("two rows in one sequence, apart", u.packed_apart)),
        kind("clean_requests_shuffled", h.requests_shuffled),
        kind("clean_training_mode", t.scores_by("training mode, no dropout", u.in_training_mode)),
        kind(
            "clean_padding_in_the_middle",
            t.scores_by("padding behind the prompt, not counted", u.padded_in_the_middle(counted=False)),
        ),
        kind(
            "clean_micro_batches_put_back",
            t.scores_by("rows sorted by length and put back", u.sorted_by_length(put_back=True)),
        ),
        kind("clean_without_a_cache", h.without_cache),
        kind(
            "clean_experts_of_two_ranks",
            e.computes("experts of two ranks added", e.of_model(v.experts_of_two_ranks)),
            ("moe",),
        ),
        kind("clean_second_turn", s.mistaken("a second turn on both sides", turn, turn), DENSE),
    ]
