"""Environments: what an agent's code gets to talk to the model of its session."""
