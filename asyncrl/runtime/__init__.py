"""Small tools over the system, Ray and Serve."""
