"""The audit of the version of the reference policy that scored each group."""

from __future__ import annotations

import pytest
from small_config import small_config
from unread_books import unread_books

from asyncrl.algorithms.pairs import Candidates
from asyncrl.run.audit.books import Books
from asyncrl.run.audit.group_checks import check_reference
from asyncrl.rundir.audited_rows import Row


def row(ordinal: int, oldest: int, reference: int | None) -> Row:
    return Row(
        attempt=0,
        ordinal=ordinal,
        replica="",
        started_at=0.0,
        finished_at=0.0,
        lengths=(1,),
        losses=(1,),
        candidates=Candidates((), (), (), ()),
        versions=(oldest,),
        loss_by_version={oldest: 1},
        whole=True,
        content="",
        generation="",
        prompt_ids=(),
        rewards=(),
        faults=(),
        reference=reference,
    )


def books(
    every: int | None, groups: list[tuple[int, int | None, int | None]], loaded: bool = False
) -> Books:
    """Groups of (oldest token version, version of the reference, trained at; None: not trained)."""
    rows = {(0, place): row(place, oldest, ref) for place, (oldest, ref, _) in enumerate(groups)}
    trained = [
        ({"attempt": 0, "ordinal": place, "trained_at_version": at}, rows[0, place])
        for place, (_, _, at) in enumerate(groups)
        if at is not None
    ]
    reference = {"kl_loss_coef": 0.1, "update_interval": every}
    return unread_books(
        small_config(algorithm={"reference": reference}),
        attempts=[{"checkpoint": "/other/run" if loaded else None, "from_attempt": None}],
        rows=rows,
        trained=lambda: trained,
    )


@pytest.mark.parametrize(
    ("every", "groups", "summary"),
    [
        (None, [(3, 0, 4), (9, None, 9)], "1 groups"),
        (None, [(3, 4, 4)], "1 groups; wrong: 0 (version 4)"),
        (4, [(3, 0, 3), (3, 4, 5), (4, 4, 4), (7, 8, 9), (7, 8, None)], "5 groups"),
        (4, [(3, 0, 3), (4, 0, 5)], "2 groups; wrong: 1 (version 0)"),
        (4, [(7, 8, 7)], "1 groups; wrong: 0 (version 8)"),
        (4, [(6, 5, 7)], "1 groups; wrong: 0 (version 5)"),
        (4, [(6, None, 7)], "0 groups; wrong: 0 (without a version)"),
        (4, [(6, None, None)], "0 groups"),
    ],
)
def test_the_version_is_the_last_due_one(
    every: int | None, groups: list[tuple[int, int | None, int | None]], summary: str
) -> None:
    check = check_reference(books(every, groups))
    assert check.summary == summary and check.passed == ("wrong" not in summary)


def test_a_run_from_another_runs_checkpoint_may_begin_with_any_version() -> None:
    assert check_reference(books(4, [(6, 3, 7), (9, 8, 9)], loaded=True)).passed
    assert not check_reference(books(4, [(6, 8, 7)], loaded=True)).passed
