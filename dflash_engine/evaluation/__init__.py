"""The five-step CPU evaluation: how many tokens one verification step yields with a given drafter."""
