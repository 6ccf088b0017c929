"""Names in a run folder: every file, every column of the rollouts, and the keys that every row has."""

from __future__ import annotations

from pathlib import Path

# ---------------------------------------------------------------------------------------------------------------- files

METRICS_FILE = "metrics.jsonl"
"""One JSON object per logging step, evaluations included."""
RUN_FILE = "run.json"
"""Where the numbers come from: method, model, seed, command, versions."""
ACTIONS_FILE = "actions.jsonl"
"""One JSON object per action of ``control``."""
SYNCS_FILE = "syncs.jsonl"
"""One JSON object per weight sync: what it sent, how much of the update the engine can hold, and a checksum."""
ROLLOUTS_FILE = "rollouts.parquet"
"""A folder of parts, one per step and rank; a single file can be read as well."""
WORST_FOLDER = "worst_responses"
"""A file for each rank: the few responses on which engine and trainer disagree most, with the text of each token."""
RECIPE_FILE = "recipe.yaml"
"""The options that reproduce the run, if the script that started it wrote them."""
EVALUATION_FILE = "evaluation.json"
"""The held-out numbers of the first and of the last evaluation of the run, each with its step."""
REPORT_FILE = "report.html"
CARD_FILE = "README.md"
RECORDS = (RUN_FILE, RECIPE_FILE, METRICS_FILE, EVALUATION_FILE, ACTIONS_FILE, SYNCS_FILE, ROLLOUTS_FILE, WORST_FOLDER,
           REPORT_FILE)  # fmt: skip
"""What belongs to one run: a new run in the same folder moves these out of its way."""
PREVIOUS_FOLDER = "_previous"
"""The folder to which it moves them, in a subfolder named by the time."""
LOCK_FILE = "_run.lock"
"""Process and machine of the run that has the folder, while it runs. Names with "_" are not uploaded to the Hub."""
UNFINISHED = "_unfinished-"
"""Prefix of a checkpoint that is being written."""
ENGINE_WEIGHTS_FOLDER = "_engine_weights"
"""Weights on their way to an engine that reads files."""

PROBE_FILE = "probe.json"
PROBE_PAGE = "probe.html"
"""What ``trl-offpolicy probe`` found, for scripts and for people."""

STATE_FILE = "trainer_state.json"
"""Written by transformers; its log history is read if ``metrics.jsonl`` is missing."""

ROLLOUT_PARTS = "part-*.parquet"
WORST_FILES = "rank-*.json"


def worst_file(rank: int) -> str:
    """The file of one rank in :data:`WORST_FOLDER`.

    Example:
        >>> worst_file(3)
        'rank-0003.json'
    """
    return f"rank-{rank:04d}.json"


def rollout_part(step: int, rank: int) -> str:
    """The part that holds what one rank sampled for one optimizer step.

    Example:
        >>> rollout_part(12, 0)
        'part-0000012-0000.parquet'
    """
    return f"part-{step:07d}-{rank:04d}.parquet"


def step_of_part(part: Path) -> int:
    """The optimizer step of a part.

    Example:
        >>> step_of_part(Path("part-0000012-0000.parquet"))
        12
    """
    return int(part.name.split("-")[1])


SETTINGS = "settings"
"""Entry of ``run.json`` with the settings of the run, by their names in YAML: the doctor fits its fix to them."""

TOKEN_IDS = "token_ids"
"""Entry of ``run.json`` with the option ``check_token_ids`` and what the first generation batch showed."""

# -------------------------------------------------------------------------------------------------- rows of the metrics

STEP = "step"
"""Optimizer steps so far, in every row of ``metrics.jsonl`` and of the rollouts."""
TIME = "time"
"""Seconds since 1970."""
EVAL_PREFIX = "eval_"
"""Prefix of the keys of an evaluation."""

# ---------------------------------------------------------------------------------------------- columns of the rollouts

PROMPT = "prompt"
PROMPT_IDS = "prompt_ids"
COMPLETION = "completion"
REWARD = "reward"
ADVANTAGE = "advantage"
GROUP_ID = "group_id"
POLICY_VERSION = "policy_version"
COMPLETION_IDS = "completion_ids"
COMPLETION_MASK = "completion_mask"
SAMPLING_LOGPS = "sampling_per_token_logps"
OLD_LOGPS = "old_per_token_logps"
ENTROPIES = "entropies"
WEIGHTS = "weights"
KEEP_MASK = "keep_mask"
POLICY_VERSIONS = "policy_versions"

ROW_COLUMNS = {
    STEP: "int64",
    POLICY_VERSION: "int64",
    PROMPT: "string",
    COMPLETION: "string",
    REWARD: "float32",
    ADVANTAGE: "float32",
    GROUP_ID: "int64",
}
"""Columns with one value per completion, and their types in Parquet."""
PROMPT_COLUMNS = {PROMPT_IDS: "int64"}
"""Columns with one list per completion, which has one entry per token of its prompt, and the types of the entries."""
TOKEN_COLUMNS = {
    COMPLETION_IDS: "int64",
    COMPLETION_MASK: "bool",
    SAMPLING_LOGPS: "float32",
    OLD_LOGPS: "float32",
    ENTROPIES: "float32",
    WEIGHTS: "float32",
    KEEP_MASK: "bool",
    POLICY_VERSIONS: "int64",
}
"""Columns with one list per completion, which has one entry per token, and the types of the entries."""
