"""Sessions: from the tree of an agent's turns to the learner's rows. Pure functions."""
