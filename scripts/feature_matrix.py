"""Writes the table of features by trainer in docs/lightning.md. A cell names the test that shows it, or says why not.

python scripts/feature_matrix.py    # tests/docs/test_docs_features.py: the tests exist and the page is current
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "lightning.md"
BEGIN, END = "<!-- features -->\n", "<!-- end of features -->\n"
BOTH = "tests/lightning/test_equality.py::test_loss_gradients_metrics_and_weights_are_those_of_trl"
ENTROPY = "tests/lightning/test_equality_entropy.py::test_loss_gradients_metrics_and_weights_are_those_of_trl"
EXPERTS = "tests/lightning/test_equality_experts.py::test_loss_gradients_metrics_and_weights_are_those_of_trl"
AHEAD = "tests/lightning/test_ahead.py::test_weights_and_numbers_are_those_of_trl"
SHARDED = "tests/lightning/test_sharded.py::test_it_shards_and_trains_as_one_process"
STRATEGIES = "tests/scale_out/test_strategies.py::test_weights_are_those_of_one_process"
ONE_SEQUENCE = "tests/scale_out/test_one_sequence.py::test_weights_and_metrics_are_those_of_the_plain_path"
SERVER = "tests/engines/server/test_server_training.py::test_engine_and_trainer_agree_through_a_server"
DUPLICATES = "tests/rollouts/test_duplicates_hf.py::test_rows_that_draw_the_same_numbers_are_found"
EXACTLY = "tests/trl/test_resume.py::test_a_resumed_run_goes_on_exactly"
EXACTLY_TOO = "tests/lightning/test_checkpoints.py::test_a_resumed_run_goes_on_exactly"
HELD_OUT = "tests/trl/test_evaluation.py::test_both_trainers_count_each_prompt_once"


@dataclass(frozen=True)
class Feature:
    """One row.

    Args:
        name: what the reader looks for.
        trl: ``file::test`` that shows it in ``OffPolicyGRPOTrainer``, several with ", " between them, or a sentence
            that says why it is not there. ``[id]`` names the parameters, if one set of them shows it.
        lightning: the same for ``OffPolicyGRPOModule``.
    """

    name: str
    trl: str
    lightning: str


FEATURES = (
    Feature("losses, corrections, KL, wide scopes, estimators", BOTH, BOTH),
    Feature("micro-batches without padding, prompts computed once",
            "tests/trl/test_compact.py::test_a_run_takes_the_same_steps",
            "tests/lightning/test_compact.py::test_the_steps_are_those_of_the_plain_path"),
    Feature("bfloat16 over 50 steps", "tests/lightning/test_precision.py::test_fifty_steps",
            "tests/lightning/test_precision.py::test_fifty_steps"),
    Feature("float16 with a scaled loss", "accelerate takes it on a GPU alone: not run",
            "tests/lightning/test_precision.py::test_float16_with_a_scaled_loss"),
    Feature("vLLM in the process, every sync proved",
            "tests/engines/test_colocate.py::test_engine_and_trainer_agree_after_large_steps, "
            "tests/engines/test_colocate.py::test_every_sync_is_proven_and_logged",
            "tests/lightning/test_vllm.py::test_engine_and_trainer_agree_after_every_sync"),
    Feature("vLLM server, weights or adapter", SERVER,
            "tests/lightning/test_vllm.py::test_a_server_gets_the_weights_or_the_adapter_from_one_or_two_ranks"),
    Feature("weights by broadcast (Gloo here, NCCL on GPUs)", SERVER,
            "tests/lightning/test_vllm.py::test_a_server_gets_the_weights_or_the_adapter_from_one_or_two_ranks"),
    Feature("TRL's own NCCL client", "on a GPU: not run", "no: `broadcast` has its place"),
    Feature("exact engine", "tests/trl/test_exact.py::test_the_first_generation_is_checked_and_run_json_says_so",
            "tests/lightning/test_vllm.py::test_an_exact_engine_is_checked_at_the_first_generation"),
    Feature("a learner in the engine's precision",
            "tests/engines/test_colocate.py::test_a_learner_that_rounds_as_its_engine_does_agrees_with_it",
            "tests/lightning/test_equality.py::test_loss_gradients_metrics_and_weights_are_those_of_trl"),
    Feature("a compressed KV cache, and a learner that repeats it",
            "tests/trl/test_simulated.py::test_a_learner_that_computes_alike_has_a_ratio_of_one",
            "tests/lightning/test_simulated.py::"
            "test_the_sampling_policy_is_the_engine_and_a_learner_alike_has_a_ratio_of_one"),
    Feature("distillation from the policy's own dense context",
            "tests/trl/test_simulated.py::test_the_reference_is_the_policy_in_its_dense_context",
            "tests/lightning/test_simulated.py::test_the_reference_is_the_policy_in_its_dense_context"),
    Feature("noise in the forward that learns",
            "tests/trl/test_trainer_controllers.py::test_the_noise_of_the_forward_learns_and_goes_on_from_a_checkpoint",
            "tests/lightning/test_equality.py::test_noise_on_hidden_states_and_its_scale_are_those_of_trl"),
    Feature("presets that set the trainer: bound on gradients, learning rate, noise, updates taken back",
            "tests/trl/test_control.py::test_a_gradient_too_aligned_with_the_one_before_is_projected[preset], "
            "tests/trl/test_control.py::test_the_ceiling_follows_the_lag_of_the_rows[paper/staleness-ceiling], "
            "tests/trl/test_trainer_controllers.py::test_a_preset_perturbs_the_forward_that_learns, "
            "tests/trl/test_ahead.py::test_an_update_that_parts_engine_and_trainer_is_taken_back[preset]",
            "tests/lightning/test_control.py::test_a_gradient_too_aligned_with_the_one_before_is_projected[preset], "
            "tests/lightning/test_control.py::test_the_ceiling_follows_the_lag_of_the_rows[paper/staleness-ceiling], "
            "tests/lightning/test_control.py::test_a_preset_perturbs_the_forward_that_learns, "
            "tests/lightning/test_control.py::test_an_update_that_parts_engine_and_trainer_is_taken_back[preset]"),
    Feature("presets that set the engine: rounding, noise, versions, overlap",
            "tests/engines/test_colocate.py::test_a_preset_brings_the_noise_of_a_rounded_engine, "
            "tests/rollouts/ahead/test_server_ahead.py::test_a_preset_has_several_versions_live_at_once, "
            "tests/trl/test_ahead.py::test_periodic_asynchrony_asks_for_a_whole_step_and_is_never_stale[preset]",
            "tests/lightning/test_vllm.py::"
            "test_presets_bring_a_rounded_engine_and_a_learner_that_follows_it_or_its_noise, "
            "tests/lightning/test_server_ahead.py::"
            "test_a_preset_leaves_responses_the_adapter_that_they_began_with, "
            "tests/lightning/test_ahead.py::"
            "test_periodic_asynchrony_asks_for_a_whole_step_and_is_never_stale[paper/periodic-async]"),
    Feature("a teacher in the rollouts (logit fusion)",
            "tests/trl/test_fusion.py::test_the_mixture_is_the_sampling_policy",
            "tests/lightning/test_deliberate.py::test_the_mixture_is_the_sampling_policy"),
    Feature("noise on the engine's norms",
            "tests/engines/test_colocate.py::test_noise_on_the_norms_is_in_the_rollouts_of_the_training_alone",
            "tests/lightning/test_vllm.py::test_noise_on_the_norms_is_in_the_rollouts_alone"),
    Feature("tokens taken of a speculative draft",
            "tests/engines/test_colocate.py::test_the_tokens_taken_of_a_draft_are_counted",
            "tests/lightning/test_vllm.py::test_the_tokens_taken_of_a_draft_are_counted"),
    Feature("independent draws on every rank",
            "tests/trl/test_draws_two_ranks.py::test_no_two_completions_of_a_group_are_equal",
            "tests/lightning/test_noise.py::test_two_ranks_draw_apart"),
    Feature("tools", "tests/trl/test_agents.py::test_trls_tool_loop",
            "tests/lightning/test_agents.py::test_the_calculator_agent_is_the_same_in_both_trainers"),
    Feature("environments", "tests/trl/test_agents.py::test_an_environment_goes_the_same_way",
            "tests/lightning/test_agents.py::test_environments_are_the_same_in_both_trainers"),
    Feature("your own rollout function", "tests/lightning/test_agents.py::test_a_rollout_function_is_that_of_trl",
            "tests/lightning/test_agents.py::test_a_rollout_function_is_that_of_trl"),
    Feature("weights and masks by turn", "tests/trl/test_agents.py::test_weights_and_keep_terms_go_by_turn",
            "tests/lightning/test_agents.py::test_the_calculator_agent_is_the_same_in_both_trainers"),
    Feature("token-id check", "tests/trl/test_agents.py::test_ids_that_were_not_sampled_are_found",
            "tests/lightning/test_agents.py::test_ids_that_were_not_sampled_are_found"),
    Feature("sampling ahead, versions by token",
            "tests/trl/test_ahead.py::test_a_cut_response_keeps_its_tokens_and_goes_on_under_the_new_weights", AHEAD),
    Feature("a part of a batch ahead (asynchronous ratio)",
            "tests/trl/test_ahead.py::test_half_a_lag_is_half_of_each_batch_a_generation_early", AHEAD),
    Feature("sampling ahead of a real server",
            "tests/rollouts/ahead/test_server_ahead.py::test_one_step_off_policy_and_a_resume",
            "tests/lightning/test_server_ahead.py::test_one_step_off_policy_and_a_resume"),
    Feature("old policy from a model of its own",
            "tests/trl/test_ahead.py::test_a_model_of_its_own_trains_as_exchanged_weights_do",
            "tests/lightning/test_ahead.py::test_a_model_of_its_own_trains_as_exchanged_weights_do"),
    Feature("old policy from snapshots or an average",
            "tests/trl/test_ahead.py::test_snapshots_give_the_old_policy_to_the_last_digit", AHEAD),
    Feature("mixture of the versions in a batch (`balance`)",
            "tests/trl/test_ahead.py::test_the_mixture_of_the_versions_is_nearer_than_an_old_version_alone", AHEAD),
    Feature("rewards by token of your own (a process reward model's)",
            "tests/trl/test_token_rewards.py::test_a_group_compares_the_sums_of_its_responses, "
            "tests/trl/test_token_rewards.py::test_reinforce_plus_plus_returns_them_by_token",
            "tests/lightning/test_token_rewards.py::test_both_trainers_learn_the_same_from_them"),
    Feature("greedy completions as a baseline (ReMax)",
            "tests/trl/test_remax.py::test_the_baseline_is_the_greedy_completion_of_the_prompt",
            "tests/lightning/test_remax.py::test_the_baseline_is_the_greedy_completion_of_the_prompt"),
    Feature("shaped advantages, a price that moves",
            "tests/lightning/test_equality.py::test_a_shaping_moves_the_gradient_and_its_price_moves_by_the_step",
            "tests/lightning/test_checkpoints.py::test_a_price_that_moves_goes_on_from_the_checkpoint"),
    Feature("an update taken back after its sync",
            "tests/trl/test_ahead.py::test_an_update_that_parts_engine_and_trainer_is_taken_back",
            "tests/lightning/test_control.py::test_an_update_that_parts_engine_and_trainer_is_taken_back"),
    Feature("replay buffer", "tests/trl/test_replay.py::test_it_learns_from_fresh_and_replayed_rows",
            "tests/lightning/test_replay.py::test_weights_and_numbers_are_those_of_trl"),
    Feature("routing replay R2 and R3, load-balancing loss", EXPERTS, EXPERTS),
    Feature("R3 with a real vLLM",
            "tests/engines/routing/test_moe_vllm.py::test_a_training_run_with_r3",
            "tests/lightning/test_moe_vllm.py::test_a_training_run_with_r3"),
    Feature("R3 ahead of the trainer", "tests/rollouts/ahead/test_routing_ahead.py::test_trl",
            "tests/rollouts/ahead/test_routing_ahead.py::test_lightning"),
    Feature("replay of the sampling mask", "tests/trl/test_kept.py::test_behind_a_server",
            "tests/lightning/test_kept.py::test_ratios_are_one_over_exactly_these_tokens_and_not_by_the_rule"),
    Feature("the same with a real vLLM", "tests/engines/test_kept_vllm.py::test_the_mean_ratio_is_one",
            "tests/engines/test_kept_vllm.py::test_lightning"),
    Feature("frozen routers", "tests/trl/test_routing.py::test_frozen_routers_do_not_move",
            "tests/lightning/test_experts.py::test_frozen_routers_do_not_move"),
    Feature("top entropy quantile, adaptive entropy, cut completions left out", ENTROPY, ENTROPY),
    Feature("images",
            "tests/trl/test_images.py::test_it_learns_from_images_with_the_loss_and_gradient_of_trl",
            "tests/lightning/test_images.py::test_loss_gradients_metrics_and_weights_are_those_of_trl"),
    Feature("images under top-p, top-k and min-p",
            "tests/trl/test_images.py::test_images_under_a_truncated_distribution",
            "tests/lightning/test_images.py::test_images_under_a_truncated_distribution"),
    Feature("images with a real vLLM in the process", "TRL's own request, not changed here: not run",
            "tests/lightning/test_images_vllm.py::test_engine_and_trainer_see_the_same_images_after_every_sync"),
    Feature("control: stop", "tests/trl/test_control.py::test_stop_ends_the_run_with_a_checkpoint_to_go_on_from",
            "tests/lightning/test_control.py::test_stop_leaves_a_checkpoint_to_go_on_from"),
    Feature("control: act",
            "tests/trl/test_control.py::test_escalation_changes_the_correction_in_use_and_comes_back",
            "tests/lightning/test_control.py::test_escalation_changes_the_correction_in_use_and_comes_back"),
    Feature("`auto`", "tests/trl/test_auto.py::test_it_moves_where_the_mismatch_grows",
            "tests/lightning/test_auto.py::test_it_moves_where_the_mismatch_grows_and_a_resumed_run_moves_alike"),
    Feature("run folder, report, recorded rollouts",
            "tests/trl/test_trainer.py::test_rollouts_have_one_correct_row_per_completion",
            "tests/lightning/test_module.py::test_the_run_folder_holds_what_the_trl_side_writes"),
    Feature("validation with pass@1, each prompt once", HELD_OUT, HELD_OUT),
    Feature("test and predict loops", "no: TRL has `evaluate` alone",
            "tests/lightning/test_held_out.py::test_predict_returns_what_was_sampled_for_each_prompt"),
    Feature("model card, upload",
            "tests/diagnosis/report/test_model_card.py::"
            "test_push_to_hub_writes_the_card_and_leaves_out_what_is_ours_alone",
            "tests/lightning/test_export.py::test_the_folder_is_uploaded_to_the_named_repository"),
    Feature("resume that goes on exactly", EXACTLY, EXACTLY_TOO),
    Feature("the same on two ranks that draw by themselves",
            "tests/trl/test_resume_two_ranks.py::test_each_rank_draws_what_the_whole_run_drew",
            "tests/lightning/test_ddp_resume.py::test_each_rank_draws_what_the_whole_run_drew"),
    Feature("a checkpoint at a validation", f"{EXACTLY}[at_an_evaluation]", f"{EXACTLY_TOO}[at_a_validation]"),
    Feature("replies that cannot be used (`on_bad_rollout`)",
            "tests/trl/test_screening.py::test_a_dropped_reply_leaves_the_step_and_its_baseline",
            "tests/lightning/test_screening.py::test_a_dropped_reply_leaves_the_step_and_its_baseline"),
    Feature("tools and environments, sampled ahead",
            "tests/trl/test_agents_ahead.py::test_without_lag_it_is_trls_own_loop",
            "tests/lightning/test_agents_ahead.py::test_without_lag_it_is_the_run_in_turn"),
    Feature("tools and environments that fail",
            "tests/lightning/test_agents.py::test_faults_of_tools_and_environments_are_the_same_in_both_trainers",
            "tests/lightning/test_agents.py::test_faults_of_tools_and_environments_are_the_same_in_both_trainers"),
    Feature("one folder, one run", "tests/trl/test_checkpoints.py::test_a_second_run_in_the_folder_is_refused",
            "tests/lightning/test_whole_checkpoints.py::test_a_second_run_in_the_folder_is_refused"),
    Feature("whole checkpoints", "tests/trl/test_checkpoints.py::test_a_half_written_checkpoint_is_passed_over",
            "tests/lightning/test_whole_checkpoints.py::test_a_half_written_checkpoint_is_passed_over"),
    Feature("a full disk", "tests/trl/test_checkpoints.py::test_a_full_disk_ends_the_run_with_one_sentence",
            "tests/lightning/test_whole_checkpoints.py::test_a_full_disk_ends_the_run_with_one_sentence"),
    Feature("two ranks train as one", f"{STRATEGIES}[cpu_ddp-full]",
            "tests/lightning/test_ddp.py::test_two_processes_train_as_one"),
    Feature("FSDP2, ZeRO-3, two processes", STRATEGIES, SHARDED),
    Feature("FSDP1, two processes",
            "seen to train on two CPU processes, no test does it; torch crashes at saving a full state dict", SHARDED),
    Feature("transformers' `generate` from a policy in shards", "TRL's own, not changed here: not run",
            "tests/lightning/test_sharded_generate.py::test_each_rank_draws_what_one_process_draws"),
    Feature("prompts computed once on shards (FSDP2, ZeRO-3)", ONE_SEQUENCE,
            "tests/lightning/test_sharded.py::test_prompts_are_computed_once_on_shards"),
    Feature("images through a server", "TRL's own client alone (`transfer: nccl`): not run",
            "refused: requests hold token ids"),
    Feature("weight decay", "that of transformers' Trainer, not changed here",
            "tests/lightning/test_optimization.py::test_what_decays_is_what_transformers_trainer_lets_decay"),
    Feature("top-p where transformers' `generate` samples",
            "tests/trl/test_kept.py::test_what_generate_kept_is_what_is_scored",
            "tests/lightning/test_kept.py::test_transformers_generate_reports_by_itself"),
    Feature("absolute positions under padding",
            "tests/trl/test_positions.py::test_the_trainer_says_it_once_and_counts",
            "tests/rollouts/test_scoring.py::test_scores_are_those_without_padding[absolute_positions-5]"),
    Feature("`chat_template_kwargs`", "TRL's own option, not changed here",
            "tests/lightning/test_agents.py::test_variables_of_the_chat_template_are_passed"),
    Feature("settings that change the sampling policy, in `run.json`",
            "tests/engines/test_sampling_states.py::test_run_json_and_the_attribution_know",
            "tests/lightning/test_module.py::test_run_json_names_the_settings_that_change_the_sampling_policy"),
    Feature("copies among the completions of a prompt", f"{DUPLICATES}[by_trl]", f"{DUPLICATES}[by_lightning]"),
    Feature("a trainer that is not this kit's",
            "tests/trl/test_attach_rloo.py::test_the_engines_log_probs_are_measured_and_recorded",
            "tests/lightning/test_observer.py::test_it_measures_records_and_reports"),
)  # fmt: skip


def tests_of(shown_by: str) -> list[str]:
    """The tests that a cell names; none if it is a sentence.

    Example:
        >>> tests_of("tests/a.py::test_b, tests/a.py::test_c[d]"), tests_of("no: TRL has none")
        (['tests/a.py::test_b', 'tests/a.py::test_c[d]'], [])
    """
    return shown_by.split(", ") if shown_by.startswith("tests/") else []


def cell(shown_by: str) -> str:
    """A cell: each test's file and name in code, or the sentence."""
    return ", ".join(f"`{one.removeprefix('tests/')}`" for one in tests_of(shown_by)) or shown_by


def table() -> str:
    """The table in Markdown."""
    rows = [f"| {one.name} | {cell(one.trl)} | {cell(one.lightning)} |" for one in FEATURES]
    return "\n".join(["| feature | `OffPolicyGRPOTrainer` | `OffPolicyGRPOModule` |", "|---|---|---|", *rows]) + "\n"


def with_table(page: str) -> str:
    """The page with the present table."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
