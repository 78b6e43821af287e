"""Serves sessions to agents at a URL, in the APIs that agents speak."""
