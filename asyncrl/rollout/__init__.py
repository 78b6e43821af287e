"""Rollout workers: one group per prompt, kept until it is acknowledged."""
