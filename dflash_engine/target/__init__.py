"""The frozen target: loading, feature capture, greedy references."""
