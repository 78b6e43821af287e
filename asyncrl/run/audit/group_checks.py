"""Checks of the groups' rows: whole, unchanged, possible, and from the right prompt and version."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from asyncrl.algorithms.turn_credit import turn_advantages
from asyncrl.config import AlgorithmConfig, ConfigError, PolicyGradient
from asyncrl.contracts.rows import SESSION_ENDS
from asyncrl.data.prompts import prompt_ids_of
from asyncrl.preflight.specs import data_spec
from asyncrl.run.audit.books import Books, Key, key_of, trained_at
from asyncrl.run.audit.check import Check, listed
from asyncrl.rundir.audited_rows import FAULTS, UNEVEN, Row
from asyncrl.rundir.audited_turns import Generation, TurnCredit
from asyncrl.rundir.resume import data_hash, model_hash

ROUNDING = 1e-4
"""Tolerance of an advantage: it is float32, and so are those that it is from."""
BIAS = 0.05
"""Largest allowed distance between the length distributions of trained and generated completions,
as a share. The distance that chance explains is added."""


def check_whole(books: Books) -> Check:
    """Every trained group has its row, with all trajectories and all of their tokens."""
    without, torn, count = [], [], 0
    for outcome, row in books.trained():
        count += 1
        if row is None:
            without.append(outcome["ordinal"])
        elif (
            not row.whole or len(row.lengths) != books.attempts[row.attempt]["n_samples_per_prompt"]
        ):
            torn.append(outcome["ordinal"])
    summary = (
        f"{count} trained"
        + (f"; without a row: {listed(without)}" if without else "")
        + (f"; not whole: {listed(torn)}" if torn else "")
    )
    return Check("trained groups are whole", not without and not torn, summary)


def check_one_row(books: Books) -> Check:
    """A group has one row, and no two trained groups are the same generation."""
    first: dict[str, Key] = {}
    copies = []
    for outcome, row in books.trained():
        if row is not None and first.setdefault(row.generation, key_of(row)) != key_of(row):
            copies.append(f"{outcome['ordinal']} (as {first[row.generation][1]})")
    summary = f"{len(books.rows)} groups"
    summary += f"; two rows that differ: {listed(books.twice)}" if books.twice else ""
    summary += f"; trained again under another ordinal: {listed(copies)}" if copies else ""
    return Check("each group has exactly one row", not books.twice and not copies, summary)


def check_content(books: Books) -> Check:
    """Each row is what was scored: its hash and its tokens equal those in its outcome."""
    changed, tokens, checked = [], [], 0
    for outcome in books.outcomes:
        row = books.rows.get(key_of(outcome))
        if row is None or outcome["content"] is None:
            continue
        checked += 1
        if row.content != outcome["content"]:
            changed.append(key_of(row))
        if outcome["completion_tokens"] != sum(row.lengths) and (
            outcome["completion_tokens"] is not None or outcome["outcome"] == "trained"
        ):
            tokens.append(key_of(row))
    unsealed = sorted(
        {
            key_of(outcome)
            for outcome in books.outcomes
            if outcome["outcome"] == "trained" and not outcome["content"]
        }
    )
    summary = f"{checked} compared"
    summary += f"; changed since: {listed(sorted(set(changed)))}" if changed else ""
    if tokens:
        summary += f"; token count differs from the outcome: {listed(sorted(set(tokens)))}"
    summary += f"; trained, but the outcome has no hash: {listed(unsealed)}" if unsealed else ""
    return Check("rows are what was scored", not changed and not tokens and not unsealed, summary)


def check_possible(books: Books) -> Check:
    """Masks, spans and times have values that asyncrl can write."""
    found = [
        f"{fault}: {listed(keys)}"
        for fault in (*FAULTS, UNEVEN)
        if (keys := [key for key, row in books.rows.items() if fault in row.faults])
    ]
    return Check(
        "masks, version spans and times are possible",
        not found,
        "; ".join(found) or f"{len(books.rows)} groups",
    )


def check_versions_exist(books: Books) -> Check:
    """No token has a version that did not exist yet: one beyond the version that trained it, or
    beyond the newest of its attempt."""
    reached = {attempt["attempt"]: attempt["version"] for attempt in books.attempts}
    for outcome in books.outcomes:
        if outcome["outcome"] == "trained":
            reached[outcome["ended_in"]] = max(
                reached[outcome["ended_in"]], trained_at(outcome) + 1
            )
    found = {
        key
        for key, row in books.rows.items()
        if row.newest is not None and row.newest > reached.get(row.attempt, -1)
    }
    found |= {
        key_of(row)
        for outcome, row in books.trained()
        if row is not None and (row.newest or 0) > trained_at(outcome)
    }
    summary = f"newest version {max(reached.values(), default=0)}" + (
        f"; from the future: {listed(sorted(found))}" if found else ""
    )
    return Check("no token is from a future version", not found, summary)


def check_reference(books: Books) -> Check:
    """The reference policy that scored each group had the right version.

    It is 0 for a frozen reference. A refreshed one has a version that it takes. That is at least
    the newest of those when the group's oldest token was sampled. It is at most the version that
    trained the group.
    """
    name = "groups were scored by the right reference policy"
    try:
        algorithm = books.run.config.algorithm
    except ConfigError as error:
        return Check(name, True, f"not checked: {error}")
    every = algorithm.update_interval
    # A run that began with another run's checkpoint may have its reference policy.
    takes = every if books.first["checkpoint"] is None else None
    trained = {key_of(row): trained_at(outcome) for outcome, row in books.trained() if row}
    wrong, compared = [], 0
    for key, row in books.rows.items():
        if row.reference is None:
            if every is not None and key in trained:
                wrong.append(f"{row.ordinal} (without a version)")
            continue
        compared += 1
        oldest = (row.oldest or 0) // takes * takes if takes else 0
        newest = trained.get(key, row.reference) if every else 0
        if not oldest <= row.reference <= newest or (takes and row.reference % takes):
            wrong.append(f"{row.ordinal} (version {row.reference})")
    summary = f"{compared} groups"
    return Check(name, not wrong, summary + (f"; wrong: {listed(wrong)}" if wrong else ""))


def check_ends(books: Books) -> Check:
    """A session is trained only if `environment.train_ends` of its attempt has its end. One that it
    leaves out has its end as its status, and no other session has an end as its status."""
    wrong, unknown, count = [], set(), 0
    for row in books.rows.values():
        trains = books.attempts[row.attempt].get("train_ends")
        count += bool(row.endings)
        if trains is None and row.endings:
            unknown.add(row.attempt)
        elif trains is not None:
            wrong += [
                f"{row.ordinal} ({end} is {status})"
                for end, status in sorted(row.endings, key=str)
                if (status in SESSION_ENDS if end in trains else status != end)
            ]
    summary = f"{count} groups of sessions" + (f"; wrong: {listed(wrong)}" if wrong else "")
    if unknown:
        summary += f"; not checked, without a record of train_ends: attempts {sorted(unknown)}"
    return Check("how sessions ended decides what is trained", not wrong, summary)


def check_turn_advantages(books: Books) -> Check:
    """The advantages of turns follow from their rewards, recomputed with the settings of the last
    attempt. Groups of earlier attempts, which may have had others, are not compared."""
    name = "advantages of turns follow from their rewards"
    try:
        algorithm = books.run.config.algorithm
    except ConfigError as error:
        return Check(name, True, f"not checked: {error}")
    mine = [row for row in books.rows.values() if row.attempt == books.last]
    wrong = [row.ordinal for row in mine if not _follows(row.credit, algorithm)]
    compared = sum(row.credit is not None for row in mine)
    summary = f"{compared} groups" + (f"; wrong: {listed(wrong)}" if wrong else "")
    return Check(name, not wrong, summary)


def _follows(credit: TurnCredit | None, algorithm: AlgorithmConfig) -> bool:
    """Whether the advantages of a group's turns are those of the algorithm; without rewards of
    turns, it has none."""
    turns = algorithm.turn_rewards
    if credit is None or turns is None or not isinstance(algorithm, PolicyGradient):
        return credit is None and turns is None
    wanted = turn_advantages(
        credit.rewards,
        credit.advantages,
        [advantage is not None for advantage in credit.advantages],
        algorithm.advantage,
        turns,
    )
    return all(
        np.allclose(
            np.array(written, float),
            np.array(session or [np.nan] * len(written)),
            rtol=ROUNDING,
            atol=ROUNDING,
            equal_nan=True,
        )
        for session, written in zip(wanted, credit.written, strict=True)
    )


def check_prompts(books: Books) -> Check:
    """Every group has the prompt of its ordinal, recomputed from the data and the tokenizer. They
    are not checked if either has changed."""
    name, last = "each prompt is its ordinal's", books.attempts[books.last]
    try:
        config = books.run.config
        same = (
            data_hash(config) == last["data_hash"] != ""
            and model_hash(config) == last["model_hash"] != ""
        )
    except ConfigError as error:
        return Check(name, True, f"not checked: {error}")
    if not same:
        return Check(
            name,
            True,
            "not checked: the run's data or tokenizer is missing here, or has changed",
        )
    rows: dict[int, list[Row]] = defaultdict(list)
    for row in books.rows.values():
        rows[row.ordinal].append(row)
    recomputed = prompt_ids_of(data_spec(config), sorted(rows))
    others = [
        (row.attempt, ordinal)
        for ordinal, ids in recomputed
        for row in rows[ordinal]
        if row.prompt_ids != ids
    ]
    return Check(
        name,
        not others,
        f"{len(rows)} ordinals" + (f"; another prompt: {listed(others)}" if others else ""),
    )


def check_monotone(books: Books) -> Check:
    """A replica's weights never go back. After it has finished a group or a turn, none that it
    receives later has a token of an older version."""
    processes: dict[tuple[int, str], list[tuple[int, Generation]]] = defaultdict(list)
    for row in books.rows.values():
        for made in row.generations:
            processes[row.attempt, made.replica].append((row.ordinal, made))
    back: list[int] = []
    for generated in processes.values():
        done = sorted((made for _, made in generated), key=lambda made: made.finished_at)
        times = [made.finished_at for made in done]
        newest = np.maximum.accumulate([made.newest for made in done])
        for ordinal, made in generated:
            before = bisect.bisect_left(times, made.started_at)
            if before and made.oldest < newest[before - 1] and ordinal not in back:
                back.append(ordinal)
    summary = f"{len(processes)} replica process{'es' * (len(processes) != 1)}" + (
        f"; went back for {listed(back)}" if back else ""
    )
    return Check("versions of a replica never go back", not back, summary)


def check_lengths(books: Books) -> Check:
    """Training does not prefer some lengths: the Kolmogorov-Smirnov distance between the completion
    lengths of trained groups and of all generated groups is small.

    Groups without an outcome are left out because they may still be trained. Groups filtered for
    zero variance are left out because training excludes them on purpose. Sessions without a sampled
    token, such as those of an agent that cannot start, have no length.
    """
    generated = _sorted_lengths(
        row for key, row in books.rows.items() if books.outcome.get(key, "filtered") != "filtered"
    )
    trained = _sorted_lengths(row for _, row in books.trained() if row is not None)
    name = "trained lengths match generated lengths"
    if not len(trained):
        return Check(name, True, "nothing was trained yet")
    at = np.unique(generated)
    distance = float(
        np.abs(
            np.searchsorted(trained, at, "right") / len(trained)
            - np.searchsorted(generated, at, "right") / len(generated)
        ).max()
    )
    allowed = BIAS + 1.36 / np.sqrt(len(trained))
    summary = (
        f"trained {_quantiles(trained)}; generated {_quantiles(generated)}; largest distance"
        f" {distance:.3f}, allowed {allowed:.3f}"
    )
    return Check(name, distance <= allowed, summary)


def _sorted_lengths(rows: Iterable[Row]) -> np.ndarray:
    return np.sort(np.array([length for row in rows for length in row.lengths if length], np.int64))


def _quantiles(lengths: np.ndarray) -> str:
    tenth, half, most = (int(np.quantile(lengths, share)) for share in (0.1, 0.5, 0.9))
    return (
        f"{len(lengths)} completions of {tenth}, {half}, {most} tokens (10, 50, 90%), mean"
        f" {lengths.mean():.1f}"
    )
