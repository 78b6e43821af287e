"""Commands print, and write paths, whatever the encoding of the terminal or the locale."""

import io
import subprocess
import sys

import pytest

from asyncrl.runtime.encodings import safe_output
from asyncrl.runtime.redact import print_shown

START = """
import os, sys
from asyncrl.runtime.encodings import restart_in_utf8, safe_output
restart_in_utf8()
safe_output()
print(sys.getfilesystemencoding(), os.environ.get("PYTHONUTF8"), len(sys.argv[1]), "56 \\u2192 94")
"""
PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        (PLAIN, "utf-8 1 1 56 → 94"),
        ({"LC_ALL": "C"}, "utf-8 None 1 56 → 94"),
        ({**PLAIN, "PYTHONIOENCODING": "ascii"}, "utf-8 1 1 56 \\u2192 94"),
        ({"PYTHONUTF8": "1", "PYTHONIOENCODING": "latin-1"}, "utf-8 1 1 56 \\u2192 94"),
    ],
)
def test_a_command_in_another_locale(variables, shown):
    """An argument with one letter beyond ASCII stays one letter."""
    done = subprocess.run(
        [sys.executable, "-c", START, "ü".encode()],
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), **variables},
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode().strip() == shown


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "koi8-r"])
def test_what_the_output_cannot_show_is_escaped(monkeypatch, encoding):
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding=encoding)
    with pytest.raises(UnicodeEncodeError):
        stream.write("→ №")
    monkeypatch.setattr(sys, "stdout", stream)
    safe_output()
    print_shown("56 → № ü")
    assert stream.encoding == encoding
    assert "\\u2192" in written.getvalue().decode(encoding)


def test_output_that_is_no_file_is_left_alone(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(sys, "stdout", written)
    safe_output()
    print_shown("→")
    assert written.getvalue() == "→\n"
