"""What travels between stations."""
