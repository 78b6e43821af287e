"""Encoded rows: pairs share their prompt, and masks leave the first token out."""

import numpy as np
import pytest

from asyncrl.data.conversations import Tokens
from asyncrl.data.encoded_rows import EncodedRow, checked, paired
from asyncrl.data.form_rows import MalformedError


def side(ids, prompt):
    return Tokens(np.array(ids, np.int32), np.arange(len(ids)) >= prompt, prompt)


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [(side([1, 2, 3], 2), side([1, 4, 5], 2)), (side([1, 2, 3], 2), side([1, 2, 4], 1))],
)
def test_other_prompts_are_no_pair(chosen, rejected):
    with pytest.raises(MalformedError, match="its sides have different prompts"):
        paired(chosen, rejected, implicit=False)


@pytest.mark.parametrize(
    ("chosen", "rejected", "shared"),
    [([1, 2, 3], [1, 2, 4], 2), ([1, 2], [1, 2, 3], 2), ([1], [2], 0), ([], [1], 0)],
)
def test_an_implicit_prompt_is_what_both_begin_with(chosen, rejected, shared):
    for found in paired(side(chosen, 0), side(rejected, 0), implicit=True):
        assert found.prompt == shared
        assert found.mask.tolist() == [place >= shared for place in range(len(found.ids))]


def test_a_first_token_is_never_trained():
    (found,) = checked(EncodedRow(0, (side([1, 2], 0),))).sides
    assert found.mask.tolist() == [False, True]
    for ids in ([], [1]):
        with pytest.raises(MalformedError, match="no token to train") as error:
            checked(EncodedRow(0, (side(ids, 0),)))
        assert error.value.reason == "no_target"
