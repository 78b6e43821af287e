"""Each protocol of `contracts/protocols.py` is small and has a fake that satisfies it."""

from __future__ import annotations

import inspect
import re

import pytest

from asyncrl import testing
from asyncrl.contracts import protocols
from asyncrl.testing import FakeSink

PROTOCOLS = {
    name: kind
    for name, kind in vars(protocols).items()
    if inspect.isclass(kind) and kind.__module__ == protocols.__name__
}
RENAMED = {"PromptSource": "FakePrompts", "SharedDevice": "FakeLearner"}
"""Protocol → its fake, where the name is not `Fake` and the protocol's."""
MOST_METHODS = 5


def methods(kind: type) -> dict[str, object]:
    """Name → function, of the public methods that a protocol defines."""
    return {
        name: value
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }


def test_the_protocols_are_found() -> None:
    defined = re.findall(r"^class (\w+)", inspect.getsource(protocols), re.MULTILINE)
    assert defined and set(PROTOCOLS) == set(defined)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_has_a_fake_that_satisfies_it(name: str) -> None:
    fake = getattr(testing, RENAMED.get(name, f"Fake{name}"))
    wanted = methods(PROTOCOLS[name])
    assert 1 <= len(wanted) <= MOST_METHODS
    for method, declared in wanted.items():
        made = getattr(fake, method)
        assert inspect.iscoroutinefunction(made) == inspect.iscoroutinefunction(declared), method
        assert list(inspect.signature(made).parameters.values()) == list(
            inspect.signature(declared).parameters.values()
        ), method


def test_a_fake_sink_refuses_odd_rows_and_calls_after_its_end() -> None:
    sink = FakeSink()
    with pytest.raises(AssertionError, match="different columns"):
        sink.add_table(1, 0.0, "completions", [{"a": 1.0}, {"b": 1.0}])
    sink.close(failed=True)
    assert sink.closed is True
    with pytest.raises(AssertionError, match="closed"):
        sink.add(1, 0.0, {})
