"""Rollout workers: they make one group per prompt and keep it until it is acknowledged."""
