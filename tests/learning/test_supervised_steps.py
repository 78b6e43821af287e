"""Supervised rows, whole and in pieces: the tokens that each piece predicts, and those left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from recorded import learner_config, state_without_model

from asyncrl.contracts.offline_rows import SFT_SCHEMA, TokenRow, token_table
from asyncrl.learning.engine.state import LearnerState
from asyncrl.learning.packing.strategies import Strategy
from asyncrl.learning.steps import blame, supervised_step
from asyncrl.learning.steps.supervised_step import supervised_examples
from asyncrl.models.micro_batches import Example, micro_batch, token_example


def cut(
    rows: list[TokenRow], max_tokens: int, strategy: Strategy
) -> tuple[list[tuple[list[int], list[int]]], int, int]:
    """Tokens and targets of each piece, and the numbers of pieces and tokens left out."""
    examples, pieces, tokens = supervised_examples(token_table(rows), max_tokens, strategy)
    return (
        [
            (
                example.tokens.tolist(),
                example.tokens[example.prompt_length :][example.loss_mask].tolist(),
            )
            for example in examples
        ],
        pieces,
        tokens,
    )


ROWS: list[TokenRow] = [((10, 11, 12), (13, 14, 15, 16)), ((20,), (21,))]


def test_pieces_predict_the_tokens_that_have_context() -> None:
    """The rows are 10-16, with the prompt 10-12, and 20-21. In pieces of four tokens, 10-13
    predicts 13, and 14-16 predicts 15 and 16."""
    assert cut(ROWS, 4, "bfd_split") == (
        [([10, 11, 12, 13], [13]), ([14, 15, 16], [15, 16]), ([20, 21], [21])],
        0,
        1,
    ), "nothing predicts 14"
    batch = micro_batch(
        supervised_examples(token_table(ROWS), 4, "bfd_split")[0][1:], [0, 1], "cpu"
    )
    assert (
        batch.targets.tolist() == [15, 16, 21]
        and batch.input_ids.tolist() == [[14, 15, 20]]
        and batch.position_ids.tolist() == [[0, 1, 0]]
    )
    assert cut(ROWS, 7, "bfd") == (
        [([10, 11, 12, 13, 14, 15, 16], [13, 14, 15, 16]), ([20, 21], [21])],
        0,
        0,
    )


def test_pieces_without_a_token_to_predict_are_left_out_and_counted() -> None:
    # Pieces: 10-12 (only prompt) | 13-15 | 16 (one token), 20-21.
    assert cut(ROWS, 3, "wrapped") == (
        [([13, 14, 15], [14, 15]), ([20, 21], [21])],
        2,
        2,
    ), "nothing predicts 13 and 16"
    with pytest.raises(
        ValueError,
        match=(
            r"none of the 2 pieces of 1 supervised rows has a token to predict; raise"
            r" learner.max_tokens_per_gpu: rows of 3"
        ),
    ):
        supervised_examples(token_table([((1, 2, 3), (4,))]), 3, "bfd_split")
    with pytest.raises(
        ValueError,
        match=r"row 0 has 7 tokens, above the capacity of 3.*packing_strategy: bfd_split",
    ):
        supervised_examples(token_table(ROWS), 3, "bfd")
    with pytest.raises(
        ValueError, match="a row of 1 prompt and 0 following tokens has nothing to predict"
    ):
        token_table([*ROWS, ((1,), ())])


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_uncut_rows_give_the_micro_batch_of_whole_rows(
    strategy: Strategy,
) -> None:
    rows = [(tuple(range(3, 5 + index)), tuple(range(20, 22 + 2 * index))) for index in range(5)]
    examples, *left_out = supervised_examples(token_table(rows), 100, strategy)
    assert left_out == [0, 0]
    one, other = (
        micro_batch(examples, range(5), "cpu"),
        micro_batch([token_example(row) for row in rows], range(5), "cpu"),
    )
    assert (
        one.targets.tolist() == other.targets.tolist()
        and one.input_ids.tolist() == other.input_ids.tolist()
        and one.select.tolist() == other.select.tolist()
    )


def test_the_row_that_causes_a_nonfinite_step_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = state_without_model(learner_config(tmp_path / "model", find_nonfinite=True))
    bad = list(ROWS[1][0]) + list(ROWS[1][1])

    def backward(
        state: LearnerState,
        examples: list[Example],
        weights: list[float],
        loss: Any,
        temperature: float,
    ) -> tuple[dict[str, float], None]:
        assert temperature == 1.0
        return {
            "nonfinite_loss": float(any(example.tokens.tolist() == bad for example in examples)),
            "nonfinite_gradient": 0.0,
        }, None

    monkeypatch.setattr(blame, "backward", backward)
    monkeypatch.setattr(supervised_step, "train", lambda *_, **__: {"applied": 0.0})
    monkeypatch.setattr(blame.zero, "parameters_finite", lambda engine: True)
    monkeypatch.setattr(blame.zero, "discard_gradients", lambda engine: None)
    supervised_step.supervised_step(state, token_table(ROWS))
    assert (
        f"NaN or Inf in loss or gradient from the row with the tokens {bad}; its batch is "
        in caplog.text
    )


def test_the_rows_of_a_skipped_step_and_of_a_spike_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = state_without_model(learner_config(tmp_path / "model"))

    def step(applied: float, grad_norm: float) -> dict[str, float]:
        metrics = {"applied": applied, "grad_norm": grad_norm, "tokens": 5.0}
        monkeypatch.setattr(supervised_step, "train", lambda *_, **__: dict(metrics))
        return supervised_step.supervised_step(state, token_table(ROWS))

    for _ in range(8):
        assert step(1.0, 2.0) == {
            "applied": 1.0,
            "grad_norm": 2.0,
            "tokens": 5.0,
            "grad_norm_ratio": 1.0,
            "pieces_left_out": 0.0,
            "tokens_left_out": 0.0,
        }
    assert not (tmp_path / "runs" / "learner-test" / "kept").exists()
    assert step(1.0, 40.0)["grad_norm_ratio"] == 20.0
    assert "grad_norm_ratio" not in step(0.0, float("nan"))
    path, spike = sorted((tmp_path / "runs" / "learner-test" / "kept").iterdir())
    assert (path.name, spike.name) == (
        "supervised_000000_nonfinite.parquet",
        "supervised_000000_spike.parquet",
    )
    assert (
        "gradient norm 40 is 20 times the median" in caplog.text
        and "NaN or Inf in loss or gradient; its batch is " in caplog.text
    )
    assert pyarrow.parquet.read_table(path) == token_table(ROWS)


CHAT = pa.table(
    {
        "input_ids": [[10, 11, 12, 13, 14, 15, 16, 17]],
        "loss_mask": [[False, False, True, True, False, False, True, False]],
    },
    schema=SFT_SCHEMA,
)
"""A chat with two turns of the assistant: 12-13 and 16."""


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_each_turn_of_a_chat_is_trained(strategy: Strategy) -> None:
    (example,), *left_out = supervised_examples(CHAT, 8, strategy)
    batch = micro_batch([example], [0], "cpu")
    assert batch.targets.tolist() == [12, 13, 16] and batch.select.tolist() == [1, 2, 5]
    assert left_out == [0, 0]


def test_a_cut_chat_keeps_the_targets_of_each_piece() -> None:
    examples, *left_out = supervised_examples(CHAT, 3, "bfd_split")
    predicted = [example.tokens[1:][example.loss_mask].tolist() for example in examples]
    assert sorted(predicted) == [[12]], "13 and 16 begin a piece"
    assert left_out == [2, 2]


def test_a_malformed_table_is_refused() -> None:
    table = pa.table({"input_ids": [[1, 2]], "loss_mask": [[True, True]]}, schema=SFT_SCHEMA)
    with pytest.raises(ValueError, match="marks a first token"):
        supervised_examples(table, 8, "bfd")
