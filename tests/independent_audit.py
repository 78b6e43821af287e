"""A second audit of a run's books, with plain loops over its files and no code of asyncrl."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pyarrow.parquet as pq


def rows_of(directory: Path, folder: str) -> list[dict]:
    rows = []
    for path in sorted((directory / folder).glob("attempt_*.parquet")):
        rows += pq.ParquetFile(path, page_checksum_verification=True).read().to_pylist()
    return rows


def wrong(directory: Path) -> list[str]:
    """One line for each contradiction, with its ordinal."""
    attempts = json.loads((directory / "run.json").read_text())["attempts"]
    groups, found = {}, []
    for row in rows_of(directory, "groups"):
        key = (row["attempt"], row["ordinal"])
        if key in groups and groups[key] != row:
            found.append(f"{row['ordinal']}: two rows")
        groups[key] = row
        found += [f"{row['ordinal']}: {what}" for what in wrong_in_row(row)]
        trains = attempts[row["attempt"]].get("train_ends")
        found += [f"{row['ordinal']}: {what}" for what in wrong_ends(row, trains)]
    outcomes = []
    for ended in rows_of(directory, "outcomes"):
        if ended not in outcomes[-4096:]:
            outcomes.append(ended)
    line, at = {len(attempts) - 1}, len(attempts) - 1
    left_at = {}
    while attempts[at]["from_attempt"] is not None:
        before = attempts[at]["from_attempt"]
        left_at[before] = attempts[at]["version"]
        line.add(before)
        at = before
    trained = [ended for ended in outcomes if ended["outcome"] == "trained"]
    kept = [
        ended
        for ended in trained
        if ended["ended_in"] in line
        and ended["trained_at_version"] < left_at.get(ended["ended_in"], 1 << 60)
    ]
    found += [
        f"{ordinal}: trained {count} times"
        for ordinal, count in Counter(ended["ordinal"] for ended in kept).items()
        if count > 1
    ]
    steps, generations = defaultdict(list), {}
    for ended in trained:
        steps[ended["ended_in"], ended["trained_at_version"]].append(ended)
    for (attempt, version), batch in steps.items():
        if (
            len(batch) != attempts[attempt]["groups_per_step"]
            or len({ended["step"] for ended in batch}) != 1
        ):
            found.append(f"{batch[0]['ordinal']}: step of version {version} is not a full batch")
    for ended in kept:
        ordinal, row = ended["ordinal"], groups.get((ended["attempt"], ended["ordinal"]))
        if row is None:
            found.append(f"{ordinal}: trained without a row")
            continue
        greedy = row.get("baseline_versions") or []
        versions = [span["version"] for spans in [*row["versions"], greedy] for span in spans]
        ages = [ended["trained_at_version"] - version for version in versions]
        settings = attempts[ended["ended_in"]]
        if settings.get("masks_stale"):
            fresh = [age for age in ages if age <= settings["max_staleness"]]
            ages = fresh or ages
        staleness = max(ages, default=0)
        if (
            staleness != ended["staleness"]
            or staleness > attempts[ended["ended_in"]]["max_staleness"]
        ):
            found.append(f"{ordinal}: staleness {staleness}")
        if max(versions, default=0) > ended["trained_at_version"]:
            found.append(f"{ordinal}: a version from the future")
        if sum(map(len, row["completion_ids"])) != ended["completion_tokens"]:
            found.append(f"{ordinal}: {ended['completion_tokens']} tokens in its outcome")
        if len(row["completion_ids"]) != attempts[row["attempt"]]["n_samples_per_prompt"]:
            found.append(f"{ordinal}: {len(row['completion_ids'])} trajectories")
        made = json.dumps(
            [
                row["started_at"],
                row["finished_at"],
                row["replica"],
                row["completion_ids"],
                row["logprobs"],
            ]
        )
        if generations.setdefault(made, ordinal) != ordinal:
            found.append(f"{ordinal}: the same as {generations[made]}")
    return found


def wrong_in_row(row: dict) -> list[str]:
    found = ["times"] if not row["started_at"] <= row["finished_at"] else []
    begins = turn_begins(row)
    for trajectory, (ids, mask, logprobs, spans) in enumerate(
        zip(row["completion_ids"], row["loss_mask"], row["logprobs"], row["versions"], strict=True)
    ):
        if not len(ids) == len(mask) == len(logprobs):
            found.append("lengths")
        if set(mask) - {0, 1}:
            found.append("mask")
        place, newest = 0, -1
        for span in spans:
            if (trajectory, place) in begins:
                newest = -1
            if span["start"] != place or span["end"] <= place or span["version"] <= newest:
                found.append("spans")
            place, newest = span["end"], span["version"]
        if place != len(ids):
            found.append("spans")
    for status, reward, mask in zip(row["status"], row["reward"], row["loss_mask"], strict=False):
        if (status == "unscored" and reward is not None) or (status == "no_token" and any(mask)):
            found.append(f"{status} without a reason")
    if row.get("baseline_ids") is not None:
        found += wrong_in_baseline(row)
    return found


def wrong_ends(row: dict, trains: list[str] | None) -> list[str]:
    """Sessions with the status of another end, by the `train_ends` of their attempt."""
    found = []
    ends = row.get("session_end") or []
    for end, status in zip(ends, row["status"], strict=True) if ends else ():
        of_row = ("ok", "unscored", "bad_logprob", "over_long", "no_token", "no_teacher")
        if trains is not None and status not in (of_row if end in trains else (end,)):
            found.append(f"{end} is {status}")
    return found


def turn_begins(row: dict) -> set[tuple[int, int]]:
    """Where the turns of sessions begin: (trajectory, token). Versions may go back there."""
    at, begins = Counter(), set()
    turns = zip(row.get("turn_trajectory") or [], row.get("turn_tokens") or [], strict=True)
    for trajectory, tokens in turns:
        begins.add((trajectory, at[trajectory]))
        at[trajectory] += tokens
    return begins


def wrong_in_baseline(row: dict) -> list[str]:
    ids, spans = row["baseline_ids"], row["baseline_versions"]
    covered = [place for span in spans for place in range(span["start"], span["end"])]
    found = ["spans of the baseline"] if covered != list(range(len(ids))) else []
    if len(row["baseline_logprobs"]) != len(ids):
        found.append("lengths of the baseline")
    for reward, advantage in zip(row["reward"], row["advantage"], strict=True):
        baseline = row["baseline_reward"]
        if advantage is not None and (
            baseline is None or abs(reward - baseline - advantage) > 1e-4
        ):
            found.append("advantage")
    return found
