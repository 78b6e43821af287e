"""The Hypothesis profile of `make mutants`. Any failing example kills a mutant, so shrinking is
off."""

from hypothesis import Phase, settings

settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate))
