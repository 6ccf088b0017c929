"""The weights for an engine: read from the trainer's model, written to files, or sent as a LoRA adapter."""

from trl_offpolicy.engines.weights.source import Adapter, ModelWeights, WeightSource

__all__ = ["Adapter", "ModelWeights", "WeightSource"]
