"""verl 0.9.1's rollout correction in plain Python floats, from its documentation and source, one token at a time."""

import math

from plain_parity import clamp, ppo, rows_of

MODES = {
    "token_k1": "0.7_1.6",
    "token_k2": 0.1,
    "token_k3": 0.08,
    "seq_sum_k1": "0.6_3.0",
    "seq_sum_k2": 0.3,
    "seq_sum_k3": 0.4,
    "seq_mean_k1": "0.9_1.2",
    "seq_mean_k2": 0.1,
    "seq_mean_k3": 0.12,
    "seq_max_k2": 0.35,
    "seq_max_k3": 0.5,
}


def statistic(kind, log_ratio):
    log_ratio = clamp(log_ratio)
    return {
        "k1": -log_ratio,
        "k2": log_ratio**2 / 2,
        "k3": math.exp(log_ratio) - 1 - log_ratio,
    }[kind]


def bounds_of(kind, threshold):
    if kind != "k1":
        return -math.inf, float(threshold)
    parts = [float(part) for part in str(threshold).split("_")]
    low, high = parts if len(parts) == 2 else (1 / parts[0], parts[0])
    return math.log(low), math.log(high)  # of the ratio, though the statistic is minus its log


def keep_of(mode, threshold, log_ratios):
    level, kind = mode.rsplit("_", 1)
    low, high = bounds_of(kind, threshold)
    values = [statistic(kind, value) for value in log_ratios]
    if level == "token":
        return [low <= value <= high for value in values]
    total = {"seq_sum": sum(values), "seq_mean": sum(values) / max(len(values), 1), "seq_max": max(values, default=0)}
    return [low <= total[level] <= high] * len(values)


def weights_of(level, threshold, rows, *, normalize=False):
    parts = [float(part) for part in str(threshold).split("_")]
    weights = []
    for log_ratios in rows:
        logs = log_ratios if level == "token" else [sum(log_ratios)] * len(log_ratios)
        raw = [math.exp(clamp(value)) for value in logs]
        low, high = (None, parts[0]) if len(parts) == 1 else parts
        weights.append([min(w, high) if low is None else w * (low <= w <= high) for w in raw])
    if not normalize:
        return weights
    units = [w for row in weights for w in row] if level == "token" else [row[0] for row in weights if row]
    mean = sum(units) / len(units)
    return [[w / mean if mean > 1e-8 else w for w in row] for row in weights]


def run(batch, options):
    """Weights, keep masks and loss of verl with these options."""
    rows, bypass = rows_of(batch), options.get("bypass_mode", False)
    reinforce = bypass and options.get("loss_type") == "reinforce"
    logs = [row.total if bypass else row.mismatch for row in rows]
    weights = [[1.0] * len(row.at) for row in rows]
    if options.get("rollout_is") and (reinforce or not bypass):
        threshold, normalize = options.get("rollout_is_threshold", 2.0), options.get("rollout_is_batch_normalize")
        weights = weights_of(options["rollout_is"], threshold, logs, normalize=normalize)
    keep = [[True] * len(row.at) for row in rows]
    modes = options["rollout_rs"].split(",") if options.get("rollout_rs") else []
    thresholds = str(options.get("rollout_rs_threshold")).split(",")
    for mode, threshold in zip(modes, thresholds * (len(modes) if len(thresholds) == 1 else 1), strict=True):
        keep = [
            [a and b for a, b in zip(known, keep_of(mode, threshold, log), strict=True)]
            for known, log in zip(keep, logs, strict=True)
        ]
    total = 0.0
    for row, w, k in zip(rows, weights, keep, strict=True):
        for t in range(len(row.at)):
            centre = row.sampling[t] if bypass else row.old[t]
            clipped = ppo(row.current[t] - centre, row.advantage, dual=3.0)
            total += k[t] * w[t] * (-row.advantage * row.current[t] if reinforce else clipped)
    whole = bypass or options.get("use_v1", True)
    return weights, keep, total / sum(len(k) if whole else sum(k) for k in keep)
