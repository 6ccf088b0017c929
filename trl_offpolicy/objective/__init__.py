"""The loss: policy losses, KL penalty, proximal policy, advantages, and what is measured of them."""
