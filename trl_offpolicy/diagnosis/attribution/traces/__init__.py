"""What log-probs alone show: their features, their noise, how they are written, and the signature of each cause."""
