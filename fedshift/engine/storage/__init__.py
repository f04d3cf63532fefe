"""What stays between rounds: checkpoints and clients' states, as files of tensors."""
