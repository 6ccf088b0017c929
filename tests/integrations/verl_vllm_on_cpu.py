"""vLLM's CPU worker with weights that verl can write again."""

from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.layers import utils


class KeepsWeights(vLLMColocateWorkerExtension):
    """verl's extension of vLLM's worker, before whose first load vLLM is told to keep the matrices that it packs.

    vLLM's CPU kernels read a packed copy, and the matrix itself is thrown away: verl's ``load_weights`` would find an
    empty tensor. verl packs again after each sync (``process_weights_after_loading``), so the copies are new ones.
    """

    def __new__(cls, **kwargs: Any) -> "KeepsWeights":
        pack = utils.dispatch_cpu_unquantized_gemm
        utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: pack(layer, remove_weight=False)
        return super().__new__(cls, **kwargs)
