"""The DFlash draft model: configuration, layers, attention, checkpoints."""
