"""Models that only score: the reference policy."""
