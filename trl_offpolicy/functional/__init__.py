"""Pure functions on tensors: no trainer, no configuration, no global state; nothing here synchronises the host."""
