"""The range of single precision, in which Arrow columns keep rewards."""

FLOAT32_MAX = 3.4e38
"""Numbers beyond it would be stored as infinity."""
