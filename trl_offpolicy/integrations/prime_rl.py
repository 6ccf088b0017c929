"""The loss of prime-rl's ``[trainer.loss]``.

.. code-block:: toml

    [trainer.loss]
    type = "custom"
    import_path = "trl_offpolicy.integrations.prime_rl.loss"
    kwargs = { preset = "paper/tis", run_dir = "runs/prime_rl" }

prime-rl knows two policies: the trainer now, pi, and the one that sampled, mu. It takes one optimizer step on a batch,
so pi_old is pi without its gradient. It calls the loss for one sequence at a time, takes a sum over tokens, and divides
by the tokens of all ranks itself. Read in prime-rl 559b44772.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from trl_offpolicy.integrations._common import measured_as_total, numbers, read_method, record
from trl_offpolicy.types import PolicyBatch


def loss(inputs: Any, **kwargs: Any) -> Any:
    """The summed loss of one sequence as prime-rl's ``LossOutputs``, with numbers for its log.

    Args:
        inputs: prime-rl's ``LossInputs``: (T,) tensors, ``loss_weights`` or None.
        **kwargs: the keys of ``offpolicy`` and ``run_dir``.

    Raises:
        ValueError: a key or option is unknown, or prime-rl sets the quantity.
        NotImplementedError: the method needs more than one sequence.
    """
    method = read_method(kwargs, where="trainer.loss.kwargs", framework="prime-rl", row_by_row=True)
    batch = PolicyBatch(
        per_token_logps=inputs.trainer_logprobs.unsqueeze(0),
        sampling_per_token_logps=inputs.inference_logprobs.unsqueeze(0),
        completion_mask=inputs.loss_mask.unsqueeze(0),
        advantages=inputs.advantages.unsqueeze(0),
    )
    result = replace(measured_as_total(method), aggregation="token_sum")(batch)
    per_token = torch.where(batch.mask, result.per_token_loss, 0.0)
    if inputs.loss_weights is not None:
        per_token = per_token * inputs.loss_weights
    if inputs.trainer_logprobs.requires_grad:
        record(method, result.stats, framework="prime-rl")
    return import_module("prime_rl.trainer.rl.loss").LossOutputs(loss=per_token.sum(), metrics=numbers(result.stats))
