"""The APIs of OpenAI and Anthropic, as the servers of sessions and of standing generators speak
them."""
