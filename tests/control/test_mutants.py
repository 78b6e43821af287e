"""Every named mutant is killed."""

import mutants
import pytest


@pytest.mark.faults
@pytest.mark.timeout(1200)
def test_every_mutant_is_killed(capsys):
    with capsys.disabled():
        print()
        assert mutants.main() == 0
