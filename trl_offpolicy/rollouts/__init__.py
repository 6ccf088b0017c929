"""Between engine and loss, for every trainer: batches, sampling ahead, the replay buffer, token ids."""
