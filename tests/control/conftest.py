"""Hypothesis profile of the mutation run: a mutant is killed by any example, so none is made
smaller."""

from hypothesis import Phase, settings

settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate))
