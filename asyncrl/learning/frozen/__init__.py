"""Frozen models, which only score tokens: the reference policy."""
