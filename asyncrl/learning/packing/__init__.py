"""Packs rows of tokens into micro-batches and Arrow tables."""
