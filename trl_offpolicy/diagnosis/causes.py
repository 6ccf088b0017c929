"""The table of causes: what may be wrong, how to confirm it, and the smallest fix, with a configuration snippet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Branch = Literal["A", "B", "C", "D", "E", "F"]
"""Branches of the decision tree: A engine mismatch, B staleness, C moderate drift, D variance of the weights,
E saturated clip, F growing length, entropy, collapse."""


@dataclass(frozen=True)
class Cause:
    """One thing that goes wrong.

    Args:
        title: short name for people.
        branch: branch of the decision tree that leads here.
        meaning: what happens.
        confirm: how to make sure before changing anything.
        fix: the smallest change that helps, then the next ones.
        snippet: YAML for a recipe's ``config.yaml``; empty if the fix is not a setting of the trainer.
    """

    title: str
    branch: Branch
    meaning: str
    confirm: str
    fix: str
    snippet: str = ""


_PROBE = "Run the zero-update test: trl-offpolicy probe --model MODEL --engine-dtype DTYPE."
_FLOAT16 = "engine: {dtype: float16}\nbf16: false\nfp16: true\n"

CAUSES: dict[str, Cause] = {
    # ------------------------------------------------------------------------------ branches of the decision tree
    "engine_mismatch": Cause(
        "engine mismatch",
        "A",
        "Engine and trainer give the same tokens different probabilities at the same weights: precision, kernels, "
        "sampling settings, routing, or weights that did not arrive.",
        _PROBE + " If it is clean, the weights of the engine are not the trainer's: look at rollout/sync_agreement.",
        "First the system: the same dtype on both sides, no quantisation, the same temperature and truncation, then "
        "tensor parallelism and kernels. Correct what is left. A correction hides this fault but does not remove it.",
        "offpolicy: measure   # while you look for the cause\n" + _FLOAT16,
    ),
    "policy_staleness": Cause(
        "policy staleness",
        "B",
        "The weights have moved since the rollouts were sampled: several optimizer steps or iterations per "
        "generation, or a queue.",
        "mismatch/* is clean on fresh rollouts while staleness/* or total/* grows with rollout/version_lag_mean.",
        "Use fewer optimizer steps per generation (steps_per_generation, num_iterations) and shorter queues. Then "
        "correct the rest with three policies: rejection by geometric mean and truncated token weights.",
        "num_iterations: 1\noffpolicy: paper/geometric-mask   # the mask at 0.99 to 1.01 and token weights up to 2\n",
    ),
    "token_drift": Cause(
        "moderate token drift",
        "C",
        "Some tokens have ratios far from 1, but most samples still count.",
        "chi2_token above 0.3, ESS at least 0.5, chi2_sequence not exploding.",
        "Reject outlying sequences by their geometric mean. The gradient of what is kept does not change.",
        "offpolicy: skyrl/geometric-mask   # geometric mean in 0.99 to 1.01\n",
    ),
    "weight_variance": Cause(
        "weight variance",
        "D",
        "A few samples carry most of the weight, and the gradient is noise.",
        "ESS below 0.5, or chi2_token above 1, or gradient/noise rising after weights were switched on.",
        "Filter before reweighting: a token band gives weight 0 outside [0.5, 5]. If it drops more than 10 to 25 %, "
        "fix the system instead: less lag, more syncs, the precision.",
        "offpolicy: paper/icepop   # weight 0 outside 0.5 to 5\n",
    ),
    "rejection_limit": Cause(
        "rejection at its limit",
        "D",
        "Rejection alone is enough up to a token chi-square of 2 and a tenth of the data dropped. This is more.",
        "chi2_token between 2 and 4, or keep/dropped_* between 0.1 and 0.25. keep/<term>/* says which term drops. A "
        "term that drops on purpose (negative advantages only, old versions) is no fault.",
        "Add token weights with a cap to the rejection. Then set the band to the measured width (trl-offpolicy probe), "
        "reduce the lag, and check the precision.",
        "offpolicy: {preset: paper/geometric-mask, options: {low: 0.9, high: 1.1}}   # a start; probe measures yours\n",
    ),
    "correction_limit": Cause(
        "beyond correction",
        "D",
        "No correction will work: weights are noise, and rejection throws away more than it saves.",
        "chi2_token above 4, more than a quarter dropped (keep/dropped_*), or ESS below 0.3 under rejection. If "
        "mismatch/* is clean and staleness/* or total/* is large, the rollouts are too old. Otherwise engine and "
        "trainer differ. If much is dropped at a small chi2_token, the band is narrower than the mismatch: see what "
        "trl-offpolicy probe measures.",
        "Fix the system, not the loss. If rollouts are too old, use fewer optimizer steps per generation and shorter "
        "queues. Otherwise use the same precision, sampling settings and routing on both sides. Correct what is left.",
        "offpolicy: measure   # while you look for the cause\nnum_iterations: 1\n",
    ),
    "clip_saturation": Cause(
        "saturated clip",
        "E",
        "More than a fifth of the units are clipped: their gradient is 0.",
        "loss/clip_region_fraction above 0.2 and rising.",
        "Make smaller updates: one iteration, half the learning rate. Then use a loss that does not depend on the "
        "length (GSPO, GMPO). Do not widen the clip.",
        "num_iterations: 1\nlearning_rate: 5.0e-7   # half of yours\nimportance_sampling_level: sequence\n",
    ),
    "length_surge": Cause(
        "length surge",
        "F",
        "Responses grow by more than a fifth within 100 steps, or many more of them reach the length limit. This "
        "happens tens of steps before a collapse (arXiv 2602.01826).",
        "rollout/length_surge above 1.2, often with rising KL and clip fraction. Responses that grow with the reward, "
        "while KL and clipping are healthy, are learned: only a notice.",
        "Halve the learning rate when it happens and reject by geometric mean. If the length keeps growing, look at "
        "the reward: length bonus, missing end of sequence.",
        "control: {policy: act, controllers: {length_guard: {}}}\noffpolicy: skyrl/geometric-mask\n",
    ),
    "engine_logprobs_missing": Cause(
        "no log-probs from the engine",
        "A",
        "The engine gives no finite log-prob of what it sampled, or the trainer none of what it scores. Every ratio is "
        "then taken as 1: nothing is corrected, and numbers that compare engine and trainer are of no token.",
        "mismatch/nonfinite_fraction at 1; sampling_per_token_logps in the recorded rollouts is NaN. If these are "
        "finite and old_per_token_logps are NaN, it is the trainer's forward that overflows. The trainers of this kit "
        "end a run without the engine's log-probs after its first generation.",
        "Have the engine return the log-prob of each sampled token. If it does and they are NaN, look at its logits: "
        "float16 overflows, or weights that did not arrive whole.",
        "engine: {dtype: bfloat16}   # if its float16 overflows\n",
    ),
    "nonfinite": Cause(
        "non-finite log-probs",
        "A",
        "Tokens without a finite log-prob on one side are left out of every diagnostic.",
        "mismatch/nonfinite_fraction above 0. The recorded rollouts show which tokens.",
        "Look for tokens that the engine cannot score (NaN) or gives probability 0 (a mask or grammar that the "
        "trainer does not apply). Drop them until then.",
        "offpolicy: {preset: paper/tis, correction: {nonfinite: drop}}\n",
    ),
    "repeated_draws": Cause(
        "repeated draws",
        "A",
        "Completions of one prompt are copies of each other, and not by chance: two ranks or two requests draw the "
        "same random numbers, or the engine takes the likeliest token. The group holds fewer samples than it seems to.",
        "rollout/copied_fraction above 0: of the completions with a probability below 1e-4, those "
        "that another row of their group has too. rollout/distinct_fraction says how many are left.",
        "Give every rank a seed of its own. Leave out a seed per request, and sample at a temperature above 0.",
        "engine: {seed: 0}   # each rank adds its number; no generation_kwargs.seed\n",
    ),
    "sequence_variance": Cause(
        "variance of whole sequences",
        "D",
        "Tokens agree, but the products of their ratios over whole responses do not: a correction by response has few "
        "effective samples. Token weights are not concerned.",
        "chi2_sequence above 10, or ess_sequence of mismatch/ or total/ below 0.5, while chi2_token is small.",
        "Do not weight by products of whole responses. Truncate or mask by response instead, with the geometric mean, "
        "which does not depend on the length.",
        "offpolicy: skyrl/geometric-mask   # geometric mean in 0.99 to 1.01\n",
    ),
    "biased_reward": Cause(
        "reward of another policy",
        "A",
        "The logged reward is that of the policy that sampled. Reweighted to the trainer's policy it is another one. "
        "So the curve shows the engine's progress, not the model's (Yao et al. 2025).",
        "reward against rollout/reward_reweighted. An evaluation with the trainer's weights decides.",
        "Judge the run by evaluations, not by the logged reward, and remove what makes engine and trainer differ.",
    ),
    "entropy_collapse": Cause(
        "entropy collapse",
        "F",
        "The distribution of the next token is close to one-hot, so nothing new is sampled. Quantised rollouts without "
        "a correction end there, and truncated weights reverse it (Yao et al. 2025).",
        "loss/entropy below 0.2, well below what it was when the run began, and falling. A task that is solved has a "
        "low entropy too: look at the reward.",
        "If engine and trainer differ, correct with truncated token weights. Otherwise smaller updates, or an entropy "
        "bonus.",
        "offpolicy: paper/tis\n",
    ),
    "collapse": Cause(
        "collapse",
        "F",
        "The reward is lost, or has fallen by almost a third and did not recover in 100 steps, or it fell after a "
        "gradient ten times as large as usual, or while the entropy tripled; or responses shrink to nothing. A smaller "
        "fall with fewer steps since its best is a notice.",
        "The reward against its best, grad_norm and entropy. A harder part of the data set looks the same.",
        "Go back to a checkpoint from before, and halve the learning rate. The other findings say what drove it.",
        "learning_rate: 5.0e-7   # half of yours\n",
    ),
    "no_signal": Cause(
        "nothing to learn from",
        "F",
        "The gradient is 0, or the responses of nearly every group have equal rewards, so that all advantages are 0.",
        "grad_norm and frac_reward_zero_std. The rewards of some groups: all right, all wrong, or a reward that is a "
        "constant? If rewards differ within groups, count the trainable parameters and what the masks drop. A log "
        "that rounds may show a small gradient as 0.",
        "Take prompts that the model solves sometimes, more responses per prompt, or a reward that tells better from "
        "worse. A reward of 0 for everything is often a format that the parser of the reward does not read.",
    ),
    # ------------------------------------------------------------------------- faults that the attribution tells apart
    "temperature": Cause(
        "temperature mismatch",
        "A",
        "The engine samples at another temperature than the trainer scores with, or reports log-probs before the "
        "temperature.",
        "Compare the temperature of the engine's requests with the trainer's. logprobs_mode must be "
        "processed_logprobs.",
        "One temperature for both sides.",
        "temperature: 1.0\n",
    ),
    "truncated_sampling": Cause(
        "truncated sampling",
        "A",
        "The engine samples under top-p, top-k or min-p and the trainer scores under the whole distribution: every "
        "ratio is the kept mass, below 1.",
        "Ratios never exceed 1. The mismatch goes away with top_p: 1, top_k: 0, min_p: 0.",
        "Set the truncation in the training configuration, and this trainer truncates its own distribution in the same "
        "way. Or switch it off.",
        "top_p: 1.0\ntop_k: 0\n",
    ),
    "stale_weights": Cause(
        "stale engine weights",
        "A",
        "The engine samples with older weights than it says: a sync failed or did not take effect.",
        "rollout/sync_agreement falls. After a restart of the engine the mismatch is gone.",
        "Sync before every generation and check that the weights arrived.",
        "engine: {check_sync: true}\n",
    ),
    "other_weights": Cause(
        "other weights in the engine",
        "A",
        "The engine samples with other weights than the trainer scores with: older ones, another adapter, or updates "
        "in between. Log-probs alone do not tell which.",
        "Look at rollout/sync_agreement and rollout/version_lag_mean. Restart the engine and compare.",
        "Sync before every generation and check that the weights arrived. With LoRA, name the adapter in the "
        "request, or merge it.",
        "engine: {check_sync: true}\n",
    ),
    "wrong_adapter": Cause(
        "wrong adapter",
        "A",
        "The engine samples with the base model or another adapter.",
        "Scoring with the adapter switched off agrees with the engine.",
        "Name the adapter in the request, or merge it into the weights at each sync.",
        "engine: {transfer: auto, check_sync: true}   # auto merges the adapter at each sync\n",
    ),
    "precision": Cause(
        "precision",
        "A",
        "The engine computes or stores weights in another precision (bf16, fp16, fp8, int8, int4).",
        "The mismatch goes away with engine and trainer in the same dtype. Kernels of a GPU may still multiply float32 "
        "as TF32 (KL of some 1e-6).",
        "Use the same dtype on both sides, fp16 rather than bf16 (Qi et al. 2025). If the engine must be quantised, "
        "correct with truncated token weights.",
        _FLOAT16 + "offpolicy: paper/tis\n",
    ),
    "dropout": Cause(
        "dropout left on",
        "A",
        "The trainer scores with dropout: its own log-probs differ from one forward to the next. Padding that it "
        "attends to, or experts chosen at random, look alike.",
        "The noise floor (the same text scored twice) is as large as the mismatch. Score one batch twice in the same "
        "layout: if it differs, the trainer is random; if it is equal, its padding decides.",
        "Switch dropout off, also the adapter's. If it is off, look at the attention mask and the positions.",
        "disable_dropout: true\nlora_dropout: 0.0\n",
    ),
    "misalignment": Cause(
        "misaligned log-probs",
        "A",
        "The engine's numbers are not the log-probs, in nats, of the tokens that the trainer scores: shifted, of "
        "another row, of text that was tokenised again, of the most likely token, running sums, in another base, or "
        "clipped.",
        "Decode both sides' ids and look at a few tokens. A certain token has log-prob 0, and the engine's log-probs "
        "must match the trainer's in place, not its neighbours'.",
        "Train on the ids that the engine returned, never on text tokenised again, and pass its log-probs on "
        "unchanged.",
    ),
    "prompt_difference": Cause(
        "different prompts",
        "A",
        "Engine and trainer see different prompts: another chat template, a missing system prompt or special token.",
        "Compare the prompt's ids on both sides. The mismatch is largest at the first tokens of a response.",
        "Render the prompt once and send its ids to the engine.",
    ),
    "routing": Cause(
        "expert routing",
        "A",
        "The router of a mixture of experts chooses other experts in the engine than in the trainer.",
        "Nearly all tokens agree and a few jump; routing/flip_fraction above 0.",
        "Mask the jumps with a token band, or replay the routing: r2 at two or three optimizer steps per generation, "
        "r3 from four on, none at one.",
        "offpolicy: paper/icepop\n",
    ),
    "tool_tokens": Cause(
        "tool tokens in the loss",
        "A",
        "Text that no policy sampled (tool output, a header that the template wrote, or what a grammar or a budget "
        "forced) counts as trainable. Its sampling log-prob is a placeholder, 0.",
        "Runs of tokens whose sampling log-prob is exactly 0. Decode one: the policy's own words there are lost "
        "log-probs.",
        "Leave tool output out of completion_mask (TRL: tool_mask).",
    ),
    "model_config": Cause(
        "different model configuration",
        "A",
        "Both sides hold the same weights and compute something else with them: RoPE base or scaling, norm epsilon, "
        "attention scale, window, soft-cap, padding of the vocabulary.",
        "Compare the effective configuration of both sides: trl-offpolicy probe shows it. Look for overrides "
        "(--hf-overrides, --rope-scaling, a config.json that was edited).",
        "One config.json for both sides and no overrides.",
    ),
    "logit_processors": Cause(
        "penalties or biases in the engine",
        "A",
        "The engine changes its logits before it samples: a repetition, frequency or presence penalty, a bias, banned "
        "words, min_tokens. The trainer does not. Often generation_config.json of the model sets them.",
        "Print the sampling parameters of a request as the engine holds them. Serve with --generation-config vllm.",
        "Switch them off in the engine: repetition_penalty 1, no bias, min_tokens 0.",
        "generation_kwargs: {repetition_penalty: 1.0, presence_penalty: 0.0, frequency_penalty: 0.0}\n",
    ),
    "unreported_sampling": Cause(
        "log-probs of another distribution than sampled",
        "A",
        "Engine and trainer agree on log-probs, but the tokens were not drawn from them: log-probs from before "
        "the temperature (raw), or speculative decoding that is not exact. Ratios look clean and mean nothing.",
        "The mean of -log p minus the entropy must be 0. Set logprobs_mode: processed_logprobs. Switch speculation "
        "off.",
        "Report the log-probs of the distribution that was sampled from.",
        "engine: {logprobs_mode: processed_logprobs}\n",
    ),
    "on_purpose": Cause(
        "rollouts off-policy on purpose",
        "A",
        "The configuration asks for it: a teacher takes part in every token (engine.logit_fusion), or the engine "
        "samples with noise on its norms (engine.norm_noise). The difference falls over the training.",
        "rollout/teacher_share or rollout/norm_noise is above 0. A mismatch that stays when it has fallen has another "
        "cause.",
        "Nothing, if the correction can bear it: weights with a cap from above, and no clip against the sampler. If "
        "few samples carry the weight, start with less (alpha, start) or let it fall in fewer steps.",
    ),
    "compressed_cache": Cause(
        "compressed KV cache",
        "A",
        "The engine forgets keys and values (eviction, a sliding window of its own), so it samples in a poorer context "
        "than the trainer scores in. Short responses agree; the mismatch begins where the cache is full.",
        "Score the same tokens with the engine's cache whole, or in the trainer with its rule of eviction: one of both "
        "must agree. Sampling fewer tokens than the cache holds must agree as well.",
        "Let the learner's forward repeat what the cache held (learner_kv_cache), or give the engine a whole cache. "
        "Weights alone have a large variance here: the mismatch grows with the length.",
        "learner_kv_cache: {keep_first: 4, keep_last: 64}   # the rule of the engine's cache\n",
    ),
    "padding": Cause(
        "padding seen by the trainer",
        "A",
        "The trainer attends to padding or counts it in the positions, so a token's log-prob depends on the length of "
        "its neighbours in the batch.",
        "Score one row alone and in a batch with a longer one: the log-probs must be equal.",
        "Pass attention_mask and position_ids to the model.",
    ),
    "sync_rounding": Cause(
        "updates lost to rounding",
        "A",
        "The engine holds the weights in fewer bits (bfloat16, FP8), and the updates are smaller than their last "
        "digit: most syncs send nothing new, and the engine keeps sampling with older weights.",
        "rollout/sync_visible_fraction is far below 1, and checksums of consecutive syncs are equal.",
        "A float32 engine without weight_rounding or quantization, or 16-bit weights in the trainer too (then the "
        "optimizer sees the same rounding).",
        "engine: {dtype: float32}   # and neither weight_rounding nor quantization\n",
    ),
    "parallelism": Cause(
        "different parallelism or batch shape",
        "A",
        "Sums are taken in another order: tensor, sequence or expert parallelism, other batch sizes, other kernels. "
        "The mismatch looks like rounding and changes with the batch.",
        "Compare two settings on the same tokens: trl-offpolicy probe --against tensor_parallel_size=1 (or another "
        "max_num_seqs).",
        "The same parallelism on both sides, batch-invariant kernels (VLLM_BATCH_INVARIANT=1), or a correction.",
    ),
}
