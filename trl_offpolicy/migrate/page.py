"""A migration as text: our YAML, and lists of what was carried, renamed and left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trl_offpolicy.migrate.rules import Carried, Found, Left, Migration

GROUPS = (
    ("model_name_or_path", "dtype", "trust_remote_code", "output_dir", "run_name"),
    ("offpolicy",),
    ("use_vllm", "vllm_mode", "vllm_server_base_url", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size",
     "vllm_max_model_length", "vllm_enable_sleep_mode", "engine"),
    ("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"),
    ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "adam_beta1",
     "adam_beta2", "adam_epsilon", "max_grad_norm"),
    ("num_generations", "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
     "num_iterations", "num_train_epochs", "max_steps"),
    ("max_completion_length", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    ("loss_type", "importance_sampling_level", "epsilon", "epsilon_high", "delta", "beta", "use_bias_correction_kl",
     "entropy_coef", "scale_rewards", "off_policy_mask_threshold"),
    ("dataset_name", "train_files", "val_files", "reward", "reward_options"),
)  # fmt: skip
"""Our fields in the order and the groups of the recipes; all others follow."""
TO_SET = "TO_SET"
"""Stands in the YAML for what the user must write; recipes/grpo.py refuses it."""
NEEDED = {
    "model_name_or_path": "model_name_or_path: a name on the Hub, or a folder",
    "output_dir": "output_dir: the run's folder, e.g. runs/ours (--output_dir on the command line does, too)",
    "dataset_name": "dataset_name: on the Hub (see question_column), or instead train_files: [a.parquet]",
    "reward": "reward: file.py:function, package.module:function or a name of recipes/grpo.py --help",
}


VERL_REWARD = "verl's own functions are verl.utils.reward_score:default_compute_score, where verl is installed"


def still_to_set(framework: str, fields: Mapping[str, Any], found: Iterable[Found]) -> dict[str, str]:
    """What recipes/grpo.py needs and no setting of the file gives: our field, and what to write there.

    Args:
        framework: whose file it is.
        fields: our fields that were found.
        found: everything that was found; what was left may name fields that must be written instead.
    """
    given = {*fields, *(["dataset_name"] if "train_files" in fields else [])}
    instead = {name: text for one in found if isinstance(one, Left) for name, text in one.to_set.items()}
    missing = {name: text for name, text in {**NEEDED, **instead}.items() if name not in given}
    if framework == "verl" and "reward" in missing:
        missing["reward"] += f". {VERL_REWARD}"
    return missing


def training_fields(found: Iterable[Found]) -> dict[str, Any]:
    """Our fields outside ``offpolicy``. ``engine.dtype`` becomes ``{"engine": {"dtype": ...}}``."""
    fields: dict[str, Any] = {}
    for path, value in _paths(found):
        if path.startswith("engine."):
            fields.setdefault("engine", {})[path.removeprefix("engine.")] = value
        elif not path.startswith(("offpolicy.", "option.")):
            fields[path] = value
    return fields


def method_fields(found: Iterable[Found]) -> dict[str, dict[str, Any]]:
    """What steps add to ``offpolicy``, as ``{"correction": {...}, "objective": {...}}``; lists are joined."""
    method: dict[str, Any] = {}
    for path, value in _paths(found):
        if path.startswith("offpolicy."):
            add_to(method, path.removeprefix("offpolicy.").split("."), value)
    return method


def add_to(nested: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Put a value into a nested mapping; a list is joined to the one that is there."""
    *sections, name = path
    for section in sections:
        nested = nested.setdefault(section, {})
    nested[name] = [*nested.get(name, []), *value] if isinstance(value, list) else value


def _paths(found: Iterable[Found]) -> Iterable[tuple[str, Any]]:
    for one in found:
        if isinstance(one, Carried):
            yield from one.fields.items()


def grouped(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The fields in the groups and the order of the recipes; ``offpolicy.advantages`` stands behind ``offpolicy``."""
    known = {name for group in GROUPS for name in group}
    sections = {name: name.partition(".")[0] for name in fields}
    groups = [*GROUPS, tuple(name for name, section in sections.items() if section not in known)]
    found = [
        {name: fields[name] for first in group for name in fields if first in (name, sections[name])}
        for group in groups
    ]
    return [group for group in found if group]


def yaml_text(fields: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """YAML in groups of fields; ``comments`` are written above their field."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)

    Dumper.add_representer(float, _represent_number)

    def written(value: Any, style: bool | None) -> str:
        text: str = yaml.dump(value, Dumper=Dumper, sort_keys=False, default_flow_style=style, width=100_000)
        return text.rstrip("\n")

    blocks = []
    for group in grouped(fields):
        lines = []
        for name, value in group.items():
            lines += [f"# {comments[name]}"] if name in comments else []
            if isinstance(value, dict | list) and name != "offpolicy":
                lines.append(f"{name}: {written(value, True)}")
            else:
                lines.append(written({name: value}, None if isinstance(value, dict) else False))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def _represent_number(dumper: Any, value: float) -> Any:
    """1.0e-06 rather than 1e-06, which YAML readers take for a text."""
    text = repr(value)
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    names = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}
    return dumper.represent_scalar("tag:yaml.org,2002:float", names.get(text, text))


# ---------------------------------------------------------------------------------------------------------- the lists


def lists(
    migration: Migration, options_to: Mapping[str, str], notes: Iterable[str], missing: Iterable[str]
) -> list[str]:
    """The lines of all lists: carried, renamed, not carried, to know, to set.

    Args:
        migration: what was found.
        options_to: where each option of the correction went, by its setting.
        notes: warnings of the framework's own semantics.
        missing: our fields that nothing in the file gives.
    """
    shown = migration.settings.shown
    same: dict[str, None] = {}
    renamed: list[str] = []
    left: dict[str, list[str]] = {}
    for one in migration.found:
        if isinstance(one, Left):
            left.setdefault(one.why, []).extend(_left_names(one, shown))
        elif machine := " and ".join(dict.fromkeys(_machine(one, migration))):
            why = f"{one.why}; " if one.why else ""
            one = replace(one, why=f"{why}from {machine} of this machine")
            renamed.append(_renamed_line(one, ", ".join(shown(key) for key in one.keys)))
        elif one.keys and not one.why and not one.older and _same_name(one, shown):
            same[shown(one.keys[0])] = None
        elif one.older or not _only_options(one):
            renamed.append(_renamed_line(one, ", ".join(shown(key) for key in one.keys)))
    places: dict[str, list[str]] = {}
    told = _told(migration)
    for key, to in options_to.items():
        if key not in told:
            places.setdefault(to, []).append(shown(key))
    options = [f"{', '.join(keys)} -> {to}" for to, keys in places.items()]
    not_carried = [f"{', '.join(keys)}: {why}" for why, keys in left.items()]
    parts = {
        "carried under the same name": [", ".join(same)] if same else [],
        "carried under another name, or with another value": [*options, *renamed],
        "not carried": not_carried,
        "to know": [*migration.notes, *notes],
        "still to set": list(missing),
    }
    lines: list[str] = []
    for title, rows in parts.items():
        if rows:
            lines += [f"{title}:", *(f"  {row}" for row in rows)]
    return lines


def _machine(one: Carried, migration: Migration) -> list[str]:
    """The variables of this machine that the settings hold, as ``$HOME``."""
    return [migration.settings.machine[key] for key in one.keys if key in migration.settings.machine]


def _left_names(one: Left, shown: Callable[[str], str]) -> list[str]:
    """The settings by name, or their pattern and their number where they are many."""
    if not one.keys:
        return [f"{one.pattern} (its default)" if one.default else one.pattern]
    if len(one.keys) > 3 and "*" in one.pattern:
        return [f"{one.pattern} ({len(one.keys)} settings)"]
    return [shown(key) for key in one.keys]


def _told(migration: Migration) -> set[str]:
    """The settings of options that have a line of their own, because a field follows from them as well."""
    carried = [one for one in migration.found if isinstance(one, Carried) and not _only_options(one)]
    options = {path.removeprefix("option.") for one in carried for path in one.fields if path.startswith("option.")}
    return {key for option, key in migration.option_keys.items() if option in options}


def _only_options(one: Carried) -> bool:
    """True if the list of the correction's options has it already."""
    return bool(one.fields) and all(path.startswith("option.") for path in one.fields)


def _same_name(one: Carried, shown: Callable[[str], str]) -> bool:
    name = shown(one.keys[0]).rpartition(".")[2].lstrip("-").replace("-", "_")
    return len(one.keys) == 1 and list(one.fields) == [name]


def _renamed_line(one: Carried, keys: str) -> str:
    named = {name.removeprefix("option."): value for name, value in one.fields.items()}
    fields = ", ".join(f"{name}: {_short(value)}" for name, value in named.items())
    older = "older option: " if one.older else ""
    if not one.keys:
        return f"{fields} ({one.why})"
    to = f" -> {fields}" if fields else ""
    return f"{older}{keys}{to}{f' ({one.why})' if one.why else ''}"


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_short(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_short, value)) + "]"
    names = {True: "true", False: "false", None: "null"}
    return names[value] if value is None or isinstance(value, bool) else str(value)
