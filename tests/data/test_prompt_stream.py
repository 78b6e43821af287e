"""The stream of training prompts: order, restarts of the reader, and the values of rows."""

import asyncio

import psutil
import pyarrow as pa
import pyarrow.parquet
import pytest
import ray

from asyncrl.config import Config
from asyncrl.contracts.errors import PartDiedError
from asyncrl.contracts.rows import Prompt
from asyncrl.data.mixture import ordinal_to_row
from asyncrl.data.prompt_stream import RayPromptSource, ReorderWindow, stream_ordinals
from asyncrl.data.prompts import check_prompts, order_of
from asyncrl.preflight.specs import data_spec

ROWS = [{"prompt": f"{index}+1=", "answer": str(index + 1), "level": index} for index in range(10)]


def test_ordinals_continue_from_a_frontier():
    ordinals = stream_ordinals(4, frozenset({5, 7}))
    assert [next(ordinals) for _ in range(4)] == [4, 6, 8, 9]


def test_the_window_restores_order_and_drops_duplicates():
    window = ReorderWindow(2, frozenset({4}))
    given = []
    for ordinal in (3, 5, 2, 3, 2, 6):
        given += [prompt.ordinal for prompt in window.put(Prompt(ordinal, 0, "p", (1,)))]
    assert given == [2, 3, 5, 6]


async def take(source, count):
    try:
        return [await asyncio.wait_for(source.next(), 120) for _ in range(count)]
    finally:
        await source.close()


@pytest.mark.slow
def test_a_reader_that_dies_is_replaced(prompt_config, ray_cluster):
    """After the death come more prompts than were waiting, without duplicates and gaps."""
    config, first, then = prompt_config(ROWS), 50, 3000
    report = check_prompts(data_spec(config))

    def readers():
        return [
            one
            for one in psutil.Process().children(recursive=True)
            if "MapBatches(render_table)" in " ".join(one.cmdline())
        ]

    async def scenario():
        source = RayPromptSource(data_spec(config), report, 7, {9, 12})
        try:
            prompts = [await asyncio.wait_for(source.next(), 120) for _ in range(first)]
            [before] = readers()
            before.kill()
            prompts += [await asyncio.wait_for(source.next(), 120) for _ in range(then)]
            assert [one.pid for one in readers()] != [before.pid]
            return prompts
        finally:
            await source.close()

    given = asyncio.run(scenario())
    assert [prompt.ordinal for prompt in given] == [7, 8, 10, 11, *range(13, 13 + first + then - 4)]
    places = [ordinal_to_row(prompt.ordinal, 10, config.seed) for prompt in given]
    assert [(prompt.epoch, prompt.text) for prompt in given] == [
        (epoch, ROWS[row]["prompt"]) for epoch, row in places
    ]


def test_the_stream_yields_every_ordinal_in_order_from_a_frontier(
    prompt_config, ray_cluster, capfd
):
    # Prompts of four tokens lose their first one.
    config = prompt_config(ROWS, max_prompt_length=3, prompt_policy="truncate")
    report = check_prompts(data_spec(config))

    async def scenario():
        return await asyncio.gather(
            take(RayPromptSource(data_spec(config), report), 45),
            take(RayPromptSource(data_spec(config), report, 7, {9, 12}), 5),
        )

    from_start, from_frontier = asyncio.run(scenario())
    assert [prompt.ordinal for prompt in from_start] == list(range(45))
    for prompt in [*from_start, *from_frontier]:
        epoch, row = ordinal_to_row(prompt.ordinal, 10, config.seed)
        assert (prompt.epoch, prompt.text, prompt.columns) == (
            epoch,
            ROWS[row]["prompt"][1:],
            {"answer": ROWS[row]["answer"], "level": row},
        )
        assert len(prompt.token_ids) == 3
    assert [prompt.ordinal for prompt in from_frontier] == [7, 8, 10, 11, 13]
    out, err = capfd.readouterr()
    assert "Dataset" not in out + err and "Progress" not in out + err


@pytest.mark.slow
def test_the_stream_carries_tool_calls_maps_and_large_rows_of_a_mixture(
    prompt_config, tmp_path, ray_cluster
):
    """A map, a uint64, numbers mixed with strings, and a row above the stream's memory arrive as in
    the files."""
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    rows = [
        {"prompt": f"{n}+1=", "calls": [call] if n % 2 else [], "mixed": n if n % 3 else str(n)}
        for n in range(10)
    ]
    large = pa.table(
        {
            "prompt": ["1-1=", "2-1="],
            "map": pa.array([{"a": 1}, {"b": None}], pa.map_(pa.string(), pa.int64())),
            "big": pa.array([2**64 - 1, 0], pa.uint64()),
            "text": ["x" * (20 << 20), "y" * (20 << 20)],
        }
    )
    pyarrow.parquet.write_table(large, tmp_path / "large.parquet")
    config = prompt_config(rows)
    train = [
        {"path": config.data.train, "weight": 3},
        {"path": str(tmp_path / "large.parquet"), "weight": 1},
    ]
    config = Config.model_validate(
        config.model_dump() | {"data": {**config.data.model_dump(), "train": train}}
    )
    report = check_prompts(data_spec(config))
    order = order_of(report, data_spec(config))
    count = 24

    async def scenario():
        return await take(RayPromptSource(data_spec(config), report), count), await take(
            RayPromptSource(data_spec(config), report, 10, {11}), 3
        )

    given, later = asyncio.run(scenario())
    absent = dict.fromkeys(("calls", "mixed", "map", "big", "text"))
    expected = [{**absent, **row, "source_name": "train"} for row in rows]
    expected += [
        {**absent, **row, "source_name": "large"}
        for row in large.to_pylist(maps_as_pydicts="strict")
    ]
    for prompt in given:
        row = expected[order.epoch_and_row(prompt.ordinal)[1]]
        assert prompt.text == row["prompt"] and dict(prompt.columns) == {
            name: row[name] for name in row if name != "prompt"
        }
    assert {prompt.columns["source_name"] for prompt in given} == {"train", "large"}
    assert [prompt.ordinal for prompt in later] == [10, 12, 13] and later[0].text == given[10].text


def test_after_a_death_the_reader_starts_at_the_first_missing_prompt(prompt_config, monkeypatch):
    """Otherwise, a run of several days would render all of its prompts again."""
    config, starts = prompt_config(ROWS), []
    report = check_prompts(data_spec(config))

    def stream(source, stage, *_):
        starts.append(source.args[3])
        for number, table in enumerate(source()):
            if number == 3 and len(starts) < 3:
                raise ray.exceptions.WorkerCrashedError
            yield stage(table)

    monkeypatch.setattr("asyncrl.runtime.ray.stream.stream_blocks", stream)
    given = asyncio.run(take(RayPromptSource(data_spec(config), report, 7, {9, 12}), 400))
    assert [prompt.ordinal for prompt in given] == [7, 8, 10, 11, *range(13, 13 + 396)]
    assert starts[0] == 7 and len(starts) == 3 and starts[1] > 80 and starts[2] > starts[1] + 80


def test_a_reader_that_dies_repeatedly_breaks_the_stream(prompt_config, monkeypatch):
    config = prompt_config(ROWS)

    def stream(*_):
        raise ray.exceptions.WorkerCrashedError
        yield

    monkeypatch.setattr("asyncrl.runtime.ray.stream.stream_blocks", stream)
    with pytest.raises(PartDiedError, match="the prompt stream broke: WorkerCrashedError"):
        asyncio.run(take(RayPromptSource(data_spec(config), check_prompts(data_spec(config))), 1))
