"""The loss: policy losses, KL penalty, proximal policy, advantages, and their diagnostics."""
