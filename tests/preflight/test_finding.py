"""Findings in a terminal."""

from asyncrl.preflight.check_env.findings import Finding, findings_text

LONG = Finding("warn", "agent: right", "could not be made: " + "word " * 40)


def test_a_file_has_a_line_for_each_finding() -> None:
    first, *_, counts = findings_text([LONG]).split("\n")
    assert first == f"warn  {'agent: right':<24} {LONG.text.strip()}"
    assert counts == "0 ok, 1 warn, 0 FAIL"


def test_a_terminal_has_wrapped_lines_with_their_text_in_one_column() -> None:
    first, *further = findings_text([LONG], width=80).split("\n\n")[0].split("\n")
    assert first.startswith("warn  agent: right")
    assert len(further) > 3 and max(map(len, [first, *further])) <= 80
    assert all(line.startswith(" " * 31) and line[31] != " " for line in further)


def test_a_very_narrow_terminal_wraps_by_itself() -> None:
    assert findings_text([LONG], width=40) == findings_text([LONG])
