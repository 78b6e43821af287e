"""Fakes for every protocol of `contracts/protocols.py`, and some others.

They are deterministic, work in memory, and check their arguments. Use them to test control flow.
"""

from asyncrl.testing.agents import FakeAgentSession, FakeAgentSessions
from asyncrl.testing.chats import FakeChatSession, tool_call
from asyncrl.testing.clock import DeadlockError, VirtualTimeLoop
from asyncrl.testing.control import (
    FakeCheckpoints,
    FakeLearner,
    FakeLogprobCheck,
    FakePrompts,
    FakeRecorder,
    FakeReferencePolicy,
    FakeReplicas,
    FakeRollouts,
    FakeScores,
    FakeSink,
    FakeWeightSync,
)
from asyncrl.testing.engine import FakeEngine
from asyncrl.testing.generators import FakeGenerate, FakeServed, FakeTokenizer, SeededGenerator
from asyncrl.testing.sandbox import FakeSandbox
from asyncrl.testing.turn_generator import FakeTurnGenerator

__all__ = [
    "DeadlockError",
    "FakeAgentSession",
    "FakeAgentSessions",
    "FakeChatSession",
    "FakeCheckpoints",
    "FakeEngine",
    "FakeGenerate",
    "FakeLearner",
    "FakeLogprobCheck",
    "FakePrompts",
    "FakeRecorder",
    "FakeReferencePolicy",
    "FakeReplicas",
    "FakeRollouts",
    "FakeSandbox",
    "FakeScores",
    "FakeServed",
    "FakeSink",
    "FakeTokenizer",
    "FakeTurnGenerator",
    "FakeWeightSync",
    "SeededGenerator",
    "VirtualTimeLoop",
    "tool_call",
]
