"""What every trainer uses between engine and loss: batches, sampling ahead, the replay buffer, token ids."""
