"""The pipelined trainer: ring, loss, optimizer, checkpoints."""
