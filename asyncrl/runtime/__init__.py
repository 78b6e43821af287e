"""Small tools for files, processes, Ray and Serve."""
