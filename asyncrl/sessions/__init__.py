"""Sessions of agents: from their requests to the learner's rows."""
