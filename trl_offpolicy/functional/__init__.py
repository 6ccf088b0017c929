"""Pure functions on tensors: no trainer, no configuration, no global state. Those that wait for the device say so."""
