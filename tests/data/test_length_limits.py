"""Length limits on Arrow columns, compared with a naive version that processes row by row."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from asyncrl.data.length_limits import (
    Cuts,
    LengthLimits,
    LengthReport,
    Limit,
    TooLongError,
    cut,
    truncate,
)

TOKENS = pa.list_(pa.int32())
PROMPT = Limit(4, "truncate", "keep_end", "data.max_prompt_length", "data.prompt_policy")
COMPLETION = Limit(
    3,
    "truncate",
    "keep_start",
    "rollout.max_completion_length",
    "warm_start.packing_strategy.completion_policy",
)
WHOLE = Limit(5, "truncate", "keep_start", "data.max_length", "data.length_policy")
EOS = 2


def column(rows, type_=TOKENS):
    return pa.array(rows, type_)


def rows_of(truncated):
    """One tuple for each used row: the prompt and its completions."""
    return list(
        zip(
            truncated.prompts.to_pylist(),
            *(answers.to_pylist() for answers in truncated.completions.values()),
            strict=True,
        )
    )


def shortened(ids, limit, side):
    limit = max(limit, 0)
    return ids[:limit] if side == "keep_start" else ids[max(len(ids) - limit, 0) :]


def naive(prompts, completions, limits):
    """The expected result of `truncate`: the used rows, their indices and the report. None: a row
    is an error."""
    used, kept, report = [], [], LengthReport()
    for row, prompt in enumerate(prompts):
        ids = [prompt or [], *(answers[row] or [] for answers in completions)]
        outcome = naive_row(ids if completions else [*ids, [0]], limits)
        if outcome is None:
            return None
        left, counts = outcome
        report += counts
        if left is not None:
            used.append(tuple(left if completions else left[:1]))
            kept.append(row)
    return used, kept, report


def naive_row(ids, limits):
    report = LengthReport(rows=1)
    for stage in ("prompt", "completion", "whole"):
        limit = getattr(limits, stage)
        if limit is None:
            continue
        prompt, answers = ids[0], ids[1:]
        judged = {
            "prompt": [prompt],
            "completion": answers,
            "whole": [prompt + answer for answer in answers],
        }[stage]
        if not any(len(part) > limit.tokens for part in judged):
            continue
        if limit.policy == "error":
            return None
        if limit.policy == "drop":
            return None, replace(LengthReport(rows=1), **{stage: Cuts(dropped=1)})
        if stage == "prompt":
            cut_ids = [shortened(prompt, limit.tokens, limit.side), *answers]
        elif stage == "completion":
            cut_ids = [prompt, *(shortened(answer, limit.tokens, limit.side) for answer in answers)]
        elif limit.side == "keep_start":
            cut_ids = [
                shortened(prompt, limit.tokens, "keep_start"),
                *(
                    shortened(answer, limit.tokens - len(prompt), "keep_start")
                    for answer in answers
                ),
            ]
        else:
            answers = [shortened(answer, limit.tokens, "keep_end") for answer in answers]
            cut_ids = [
                shortened(prompt, limit.tokens - max(map(len, answers)), "keep_end"),
                *answers,
            ]
        lost = sum(map(len, ids)) - sum(map(len, cut_ids))
        report = replace(report, **{stage: Cuts(rows=1, tokens=lost)})
        ids = cut_ids
    if not all(ids[1:]):
        return None, LengthReport(rows=1, no_completion=1)
    if not ids[0]:
        return None, LengthReport(rows=1, no_prompt=1)
    return ids, report


def a_limit(limit, policies, sides):
    """Usually a limit, sometimes none."""
    some = st.builds(
        lambda tokens, policy, side: replace(limit, tokens=tokens, policy=policy, side=side),
        st.integers(1, 9),
        policies,
        sides,
    )
    return st.one_of(some, some, some, st.none())


def random_rows(rng, count):
    """Lists of 0 to 8 tokens, with some nulls."""
    return [
        (
            None
            if rng.random() < 0.05
            else rng.integers(0, 100, rng.integers(0 if rng.random() < 0.1 else 1, 9)).tolist()
        )
        for _ in range(count)
    ]


@st.composite
def cases(draw, policies=("truncate", "drop")):
    """Prompts; none, one or two completion columns with the same number of rows (nulls included);
    limits; and a slice of the rows."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    start, length, after = (
        draw(st.integers(0, 3)),
        draw(st.integers(0, 12)),
        draw(st.integers(0, 3)),
    )
    columns = [random_rows(rng, start + length + after) for _ in range(1 + draw(st.integers(0, 2)))]
    policy, side = st.sampled_from(policies), st.sampled_from(["keep_start", "keep_end"])
    limits = LengthLimits(
        draw(a_limit(PROMPT, policy, side)),
        draw(a_limit(COMPLETION, policy, side)),
        draw(a_limit(WHOLE, policy, side)),
    )
    return columns, limits, start, length


@settings(derandomize=True, max_examples=200, deadline=None)
@given(cases(), st.sampled_from([TOKENS, pa.large_list(pa.int64())]), st.booleans())
def test_every_row_is_truncated_independently(case, type_, chunked):
    columns, limits, start, length = case
    wanted, kept, report = naive(
        *(lambda sliced: (sliced[0], sliced[1:]))(
            [rows[start : start + length] for rows in columns]
        ),
        limits,
    )
    prompts, *answers = [column(rows, type_).slice(start, length) for rows in columns]
    if chunked:
        prompts = pa.chunked_array([prompts.slice(0, length // 2), prompts.slice(length // 2)])
    got = truncate(prompts, {str(number): answer for number, answer in enumerate(answers)}, limits)
    assert rows_of(got) == wanted
    assert got.kept.tolist() == kept and got.report == report
    assert (got.report.used, got.report.used + got.report.dropped + got.report.refused) == (
        len(kept),
        length,
    )
    assert {array.type for array in (got.prompts, *got.completions.values())} == {type_}
    for array in (got.prompts, *got.completions.values()):
        array.validate(full=True)
    before = [sum(len(rows[start + row] or []) for rows in columns) for row in kept]
    assert got.cut.tolist() == [
        sum(map(len, row)) < tokens for row, tokens in zip(wanted, before, strict=True)
    ]


@settings(derandomize=True, deadline=None)
@given(cases(("truncate", "drop", "error")))
def test_an_error_is_raised_if_any_single_row_raises_it(case):
    columns, limits, *_ = case
    prompts, *answers = [column(rows) for rows in columns]
    answers = {str(number): answer for number, answer in enumerate(answers)}
    if naive(columns[0], columns[1:], limits) is None:
        with pytest.raises(TooLongError):
            truncate(prompts, answers, limits)
    else:
        truncate(prompts, answers, limits)


@settings(derandomize=True, deadline=None)
@given(cases(), st.integers(0, 8))
def test_reports_of_blocks_add_up(case, at):
    columns, limits, *_ = case
    prompts, *answers = [column(rows) for rows in columns]
    blocks = [
        truncate(
            prompts.slice(start, length),
            {str(number): answer.slice(start, length) for number, answer in enumerate(answers)},
            limits,
        ).report
        for start, length in ((0, at), (at, None))
    ]
    assert (
        blocks[0] + blocks[1]
        == truncate(
            prompts, {str(number): answer for number, answer in enumerate(answers)}, limits
        ).report
    )


def test_the_three_limits_by_hand():
    prompts = column([[1, 2, 3, 4, 5, 6], [7, 8], [9]])
    completions = column([[10, 11, 12, 13, EOS], [14, EOS], [15, 16, 17, EOS]])
    got = truncate(prompts, {"completion": completions}, LengthLimits(PROMPT, COMPLETION, WHOLE))
    # The first row loses two tokens of its prompt and two of its completion. Then 4 + 3 is above 5,
    # so the completion loses two more.
    assert rows_of(got) == [([3, 4, 5, 6], [10]), ([7, 8], [14, EOS]), ([9], [15, 16, 17])]
    assert got.report == LengthReport(3, Cuts(1, 2), Cuts(2, 3), Cuts(1, 2))
    assert got.cut.tolist() == [True, False, True]
    got = truncate(
        prompts,
        {"completion": completions},
        LengthLimits(PROMPT, None, replace(WHOLE, side="keep_end", tokens=6)),
    )
    assert rows_of(got) == [
        ([6], [10, 11, 12, 13, EOS]),
        ([7, 8], [14, EOS]),
        ([9], [15, 16, 17, EOS]),
    ]


def test_a_cut_completion_loses_its_eos():
    completions = column([[10, 11, EOS], [10, 11, 12, EOS]])
    got = truncate(
        column([[1], [1]]), {"completion": completions}, LengthLimits(completion=COMPLETION)
    )
    assert got.completions["completion"].to_pylist() == [[10, 11, EOS], [10, 11, 12]]


def test_rows_without_a_token_to_learn_from_are_refused_with_a_count():
    # Empty from the start; no room after the prompt; and (keep_end) a completion that leaves no
    # room for its prompt.
    limits = LengthLimits(whole=WHOLE)
    got = truncate(
        column([[1], None, [1] * 5, [1, 2]]),
        {"completion": column([[], [EOS], [EOS], [EOS]])},
        limits,
    )
    assert (got.kept.tolist(), got.report.no_completion, got.report.no_prompt, got.report.used) == (
        [3],
        2,
        1,
        1,
    )
    got = truncate(
        column([[1], [1]]),
        {"completion": column([[7] * 5, [7] * 4])},
        LengthLimits(whole=replace(WHOLE, side="keep_end")),
    )
    assert (rows_of(got), got.report) == ([([1], [7] * 4)], LengthReport(2, no_prompt=1))


def test_a_prompt_without_completion_keeps_room_for_one_token():
    prompts = column([[1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]])
    assert rows_of(truncate(prompts, {}, LengthLimits(whole=replace(WHOLE, side="keep_end")))) == [
        ([1, 2, 3, 4],),
        ([2, 3, 4, 5],),
        ([3, 4, 5, 6],),
    ]
    for policy, report in (
        ("truncate", LengthReport(3, no_completion=2)),
        ("drop", LengthReport(3, whole=Cuts(dropped=2))),
    ):
        got = truncate(prompts, {}, LengthLimits(whole=replace(WHOLE, policy=policy)))
        assert (rows_of(got), got.report) == ([([1, 2, 3, 4],)], report)


def test_a_preference_pair_is_kept_or_dropped_as_a_whole():
    prompts = column([[1, 2, 3], [1, 2], [1]])
    pairs = {
        "chosen": column([[10, EOS], [11, EOS], [12, EOS]]),
        "rejected": column([[20, 21, 22, EOS], [23, 24, EOS], []]),
    }
    got = truncate(prompts, pairs, LengthLimits(whole=replace(WHOLE, policy="drop")))
    assert (rows_of(got), got.report) == (
        [([1, 2], [11, EOS], [23, 24, EOS])],
        LengthReport(3, whole=Cuts(dropped=1), no_completion=1),
    )
    assert rows_of(truncate(prompts, pairs, LengthLimits(whole=WHOLE)))[0] == (
        [1, 2, 3],
        [10, EOS],
        [20, 21],
    )
    # Both completions still have the same prompt.
    assert rows_of(truncate(prompts, pairs, LengthLimits(whole=replace(WHOLE, side="keep_end"))))[
        0
    ] == (
        [3],
        [10, EOS],
        [20, 21, 22, EOS],
    )


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            LengthLimits(prompt=PROMPT),
            (
                "the prompt of row 13 has 6 tokens, above data.max_prompt_length = 4; raise that,"
                " or set data.prompt_policy: drop or truncate"
            ),
        ),
        (
            LengthLimits(completion=COMPLETION),
            (
                "the rejected completion of row 13 has 4 tokens, above"
                " rollout.max_completion_length = 3; "
            ),
        ),
        (
            LengthLimits(whole=WHOLE),
            (
                "prompt and rejected completion of row 13 together have 10 tokens, above"
                " data.max_length = 5; "
            ),
        ),
    ],
)
def test_an_error_names_row_length_limit_and_fixes(limits, message):
    limits = LengthLimits(
        *(
            limit and replace(limit, policy="error")
            for limit in (limits.prompt, limits.completion, limits.whole)
        )
    )
    pairs = {"chosen": column([[1], [1, 2]]), "rejected": column([[1], [1, 2, 3, EOS]])}
    with pytest.raises(TooLongError) as error:
        truncate(column([[1], [1] * 6]), pairs, limits, first_row=12)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_the_report_is_one_line():
    assert LengthReport(4).text() == "4 of 4 rows used; none cut, none dropped"
    report = LengthReport(20, Cuts(3, 12, 1), Cuts(1, 1), Cuts(0, 0, 2), 1, 2)
    assert (
        report.text()
        == "14 of 20 rows used; max_prompt_length: 3 rows cut by 12 tokens, 1 row dropped;"
        " max_completion_length: 1 row cut by 1 token; max_length: 2 rows dropped; 1 row"
        " refused: no completion token is left; 2 rows refused: no prompt token is left"
    )


def test_cut_of_a_single_column():
    ids = column([[0], [1, 2, 3], None, [4, 5, 6, 7]]).slice(1)
    assert cut(ids, 2, "keep_start").to_pylist() == [[1, 2], [], [4, 5]]
    assert cut(ids, 2, "keep_end").to_pylist() == [[2, 3], [], [6, 7]]


def test_values_behind_a_null_are_ignored():
    ids = pa.ListArray.from_arrays([0, 2, 4], pa.array([1, 2, 3, 4]), mask=pa.array([True, False]))
    assert cut(ids, 5, "keep_start").to_pylist() == [[], [3, 4]]
    assert truncate(ids, {}, LengthLimits()).report == LengthReport(2, no_prompt=1)


@pytest.mark.parametrize(
    ("prompts", "completions"),
    [(pa.array([1, 2]), {}), (column([[1]]), {"completion": column([[1], [2]])})],
)
def test_columns_that_do_not_contain_token_ids_are_refused(prompts, completions):
    with pytest.raises(
        ValueError,
        match=r"lists, such as list<int32>, not int64|1 prompts do not match .*'completion': 2",
    ):
        truncate(prompts, completions, LengthLimits())


def test_nothing_is_copied_if_nothing_is_cut():
    prompts = column([[1, 2], [3]])
    got = truncate(prompts, {}, LengthLimits(PROMPT))
    assert got.prompts.values.buffers()[1].address == prompts.values.buffers()[1].address
    assert np.array_equal(got.kept, [0, 1])
