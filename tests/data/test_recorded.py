"""Groups that a run recorded, as rows of SFT and DPO: the recorded tokens, chosen by reward."""

from functools import partial

import pyarrow as pa
import pytest
from small_config import offline_spec

from asyncrl.config import ConfigError
from asyncrl.contracts.group_table import groups_to_table as table_of
from asyncrl.contracts.rows import Completion, Group, Prompt, Trajectory, VersionSpan
from asyncrl.data.offline_checks import refuse_idle
from asyncrl.data.offline_rows import write_offline_rows
from asyncrl.rewards.files import write_groups
from asyncrl.runtime.files.arrow_files import map_table
from asyncrl.text.tokenizer import decode, load_tokenizer

PROMPT = "3+4="


def group(ordinal, *trajectories, attempt=1, prompt=PROMPT, ids=(1, 10, 11), text=None):
    """A group of (token ids, reward, status) trajectories. Even token ids are masked. `text` gives
    the text of token ids."""
    made = []
    for tokens, reward, status in trajectories:
        tokens = tuple(tokens)
        completion = Completion(
            tokens,
            (-0.5,) * len(tokens),
            (VersionSpan(3, 0, len(tokens)),),
            "stop",
            text(tokens) if text else "text",
        )
        mask = tuple(token % 2 for token in tokens)
        made.append(Trajectory(completion, mask, reward, {"exact": reward}, 0.0, status))
    prompt = Prompt(ordinal, 0, prompt, ids)
    return Group(attempt, prompt, tuple(made), "replica", 1.0, 2.0, scored_at=3.0)


@pytest.fixture
def recorded(chat_model, tmp_path):
    """`recorded(groups, objective, **fields)`: the rows and the report of a run's groups, given as
    one list for each file. `change` changes a file's rows."""
    tokenizer = load_tokenizer(chat_model(None))
    ids = tuple(tokenizer.encode(PROMPT))

    def read(*files, objective="sft", change=None, **fields):
        folder = tmp_path / "run" / "groups"
        for number, groups in enumerate(files):
            own = [group(*item, ids=ids, text=partial(decode, tokenizer)) for item in groups]
            path = folder / f"attempt_0001-{number:08d}.parquet"
            table = table_of(own)
            if change is not None:
                rows = [change(row) for row in table.to_pylist()]
                table = pa.Table.from_pylist(rows, schema=table.schema)
            write_groups(path, [table])
        spec = offline_spec(chat_model(None), **fields)
        report = write_offline_rows(
            tmp_path / "t.arrow", spec, str(folder), "data.train", objective
        )
        refuse_idle(spec, {"data.train": report})
        return map_table(tmp_path / "t.arrow").to_pylist(), report, [*ids]

    return read


GROUPS = [
    (0, ((21, 23), 0.0, "ok"), ((25, 26, 27), 1.0, "ok"), ((29,), 1.0, "ok")),
    (1, ((31,), 0.5, "ok"), ((33,), 2.0, "unscored"), ((35,), 0.5, "ok")),
    (2, ((41,), None, "unscored"), ((43,), 0.0, "ok"), ((45,), 0.75, "ok")),
]


def test_the_best_trajectory_of_each_group_is_trained_with_its_own_mask(recorded):
    rows, report, prompt = recorded(GROUPS)
    assert [row["input_ids"] for row in rows] == [
        [*prompt, 25, 26, 27],
        [*prompt, 31],
        [*prompt, 45],
    ]
    assert rows[0]["loss_mask"] == [False] * len(prompt) + [True, False, True]
    assert report.forms == ("recorded groups",) and report.unsuitable == 0
    assert report.notes == (), "columns of a run are not listed as unused"


def test_all_trajectories_above_a_reward_are_trained(recorded):
    rows, report, prompt = recorded(GROUPS, least_reward=0.75)
    ends = [row["input_ids"][len(prompt) :] for row in rows]
    assert ends == [[25, 26, 27], [29], [45]] and report.unsuitable == 1
    assert "1 groups left out for their rewards" in report.text()


def test_the_best_is_preferred_to_the_worst_where_rewards_differ(recorded):
    rows, report, prompt = recorded(GROUPS, objective="dpo")
    count = len(prompt)
    pairs = [(row["chosen_ids"][count:], row["rejected_ids"][count:]) for row in rows]
    assert pairs == [([25, 26, 27], [21, 23]), ([45], [43])] and report.unsuitable == 1
    rows, report, _ = recorded(GROUPS, objective="dpo", least_reward=0.9)
    assert len(rows) == 1 and report.unsuitable == 2


def test_kto_labels_the_best_and_the_worst(recorded):
    rows, report, prompt = recorded(GROUPS, objective="kto")
    found = [(row["input_ids"][len(prompt) :], row["label"]) for row in rows]
    assert found == [([25, 26, 27], True), ([21, 23], False), ([45], True), ([43], False)]
    assert report.unsuitable == 1 and "labels: 2 true, 2 false" in report.notes


def test_a_group_that_was_merged_and_not_yet_deleted_counts_once(recorded):
    rows, report, _ = recorded(GROUPS[:1], GROUPS)
    assert len(rows) == 3 and report.read == 4


def test_equal_completions_and_empty_masks_are_malformed(recorded):
    bad = [
        (0, ((21,), 0.0, "ok"), ((21,), 1.0, "ok")),
        (1, ((22,), 0.0, "ok"), ((23,), 1.0, "ok")),
        GROUPS[2],
    ]
    rows, report, _ = recorded(bad, objective="dpo", malformed="drop")
    assert len(rows) == 1
    assert {reason: m.rows for reason, m in report.malformed.items()} == {
        "equal": 1,
        "no_target": 1,
    }


@pytest.mark.parametrize("wrong", ["prompt", "completion"])
def test_tokens_of_another_tokenizer_are_refused(chat_model, tmp_path, wrong):
    """The files name no tokenizer, so their texts must fit their tokens."""
    tokenizer = load_tokenizer(chat_model(None))
    ids = tuple(tokenizer.encode("1+1=" if wrong == "prompt" else PROMPT))
    made = group(
        *GROUPS[0], ids=ids, text=partial(decode, tokenizer) if wrong == "prompt" else None
    )
    write_groups(tmp_path / "groups" / "a.parquet", [table_of([made])])
    spec = offline_spec(chat_model(None))
    with pytest.raises(ConfigError, match=f"another tokenizer made the .*, since the {wrong} '"):
        write_offline_rows(tmp_path / "t", spec, str(tmp_path / "groups"), "data.train", "sft")


def test_a_model_may_have_more_token_ids_than_its_tokenizer(recorded, chat_model):
    size = len(load_tokenizer(chat_model(None)))
    groups = [(0, ((size + 1,), 0.0, "ok"), ((size + 3, 25), 1.0, "ok"))]
    rows, _, prompt = recorded(groups, vocabulary=size + 4)
    assert rows[0]["input_ids"] == [*prompt, size + 3, 25]
    with pytest.raises(ConfigError, match="the model has ids from 0 to"):
        recorded(groups, vocabulary=size + 3)


def changed(ordinal, **columns):
    """A change of the last trajectory of one group: column → its new value there."""

    def change(row):
        if row["ordinal"] == ordinal:
            row |= {
                name: [*row[name][:-1], *([] if value is None else [value])]
                for name, value in columns.items()
            }
        return row

    return change


@pytest.mark.parametrize(
    ("columns", "reason", "message"),
    [
        (
            {"completion_ids": [-1]}, "vocabulary",
            r"a token id is not in the vocabulary \(trajectory 2 has the id -1, and the model",
        ),
        ({"completion_ids": [10**6]}, "vocabulary", "trajectory 2 has the id 1000000"),
        ({"completion_ids": None}, "lengths", r"its columns .* have \[2, 3, 3, 3\] items"),
        ({"completion_ids": [45, 47]}, "lengths", "2 has 1 values of loss_mask for 2 token ids"),
        ({"loss_mask": [None]}, "missing", "trajectory 2 has nulls among its tokens"),
        ({"reward": float("nan")}, "reward", r"a reward is not finite .* trajectory 2 is nan"),
        ({"reward": float("inf")}, "reward", "trajectory 2 is inf"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_damaged_groups_are_refused_or_left_out(recorded, columns, reason, message, objective):
    change = changed(2, **columns)
    where = r"groups/attempt_0001-00000001.parquet': row 0: "
    with pytest.raises(ConfigError, match=f"{where}.*{message}.*; correct it, or set data.malf"):
        recorded(GROUPS[:1], GROUPS[2:], objective=objective, change=change)
    rows, report, _ = recorded(
        GROUPS[:1], GROUPS[2:], objective=objective, change=change, malformed="drop"
    )
    assert len(rows) == 1
    assert {reason: left.rows for reason, left in report.malformed.items()} == {reason: 1}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_on": "assistant"}, "data.loss_on = 'assistant' does not fit recorded groups"),
        ({"apply_chat_template": True}, "data.apply_chat_template = True has no effect"),
        ({"system_prompt": "Hi"}, "data.system_prompt = 'Hi' has no effect"),
        ({"least_reward": 9.0}, "no row is left .*3 groups left out"),
    ],
)
def test_settings_that_do_not_fit_are_refused(recorded, fields, message):
    with pytest.raises(ConfigError, match=message):
        recorded(GROUPS, **fields)
