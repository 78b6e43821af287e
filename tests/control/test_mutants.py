"""The tests kill every named mutant."""

import mutants
import pytest


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_still_changes_the_code(mutant):
    assert (mutants.ROOT / mutant.file).read_text().count(
        mutant.old
    ) == 1 and mutant.old != mutant.new


@pytest.mark.faults
@pytest.mark.timeout(1200)
def test_every_mutant_is_killed(capsys):
    with capsys.disabled():
        print()
        assert mutants.main() == 0
