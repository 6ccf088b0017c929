"""The weights that an engine is to have: read from the trainer's model, written to files, as a LoRA adapter."""

from trl_offpolicy.engines.weights.source import Adapter, ModelWeights, WeightSource

__all__ = ["Adapter", "ModelWeights", "WeightSource"]
