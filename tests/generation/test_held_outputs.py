"""Outputs that the engine holds: the front end makes the same completions from fewer messages."""

import random
import sys
from importlib.metadata import entry_points
from typing import Any, NamedTuple

import numpy as np
import pytest
from fake_clock import FakeClock

from asyncrl.generation import engine_environment
from asyncrl.weights.engine import OWNED

VERSIONS = ("default", "1", "2")
STEP_S = 0.03


class Request(NamedTuple):
    """What the plugin and vLLM's front end read of a request."""

    request_id: str
    sampling_params: Any


def request(name, kind, stop=()):
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=100, logprobs=0, flat_logprobs=True, detokenize=bool(stop), stop=list(stop)
    )
    params.output_kind = kind
    return Request(name, params)


def output(name, tokens, rng, finish=None, columns=1, **fields):
    """An output. vLLM's log-probs have the columns of the request that asks for the most."""
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    shape = (len(tokens), columns)
    logprobs = LogprobsLists(
        np.repeat(np.array(tokens, np.int32)[:, None], columns, axis=1),
        -rng.random(shape).astype(np.float32),
        rng.integers(1, 9, len(tokens)).astype(np.int32),
    )
    return EngineCoreOutput(name, list(tokens), logprobs, finish_reason=finish, **fields)


class Engine:
    """What the plugin changes of an engine's process, with steps that a test gives it."""

    def __init__(self):
        from vllm.v1.core.sched.interface import PauseState

        self.scheduler = self.output_queue = self
        self.pause_state, self.requests = PauseState.UNPAUSED, {}
        self.messages = []

    def put_nowait(self, message):
        self.messages.append(message)

    def process(self, step, messages):
        """Run a step that makes these messages, as the engine's loop does."""
        self.made = messages
        sent, _ = step(self)
        for message in (sent or {}).items():
            self.put_nowait(message)


@pytest.fixture
def step():
    """The plugin's step, around one that returns `engine.made`."""
    from asyncrl.generation.held_outputs import holding

    return holding(lambda engine: (engine.made, True))


@pytest.fixture
def clock(monkeypatch):
    from asyncrl.generation import held_outputs

    now = FakeClock()
    monkeypatch.setattr(held_outputs, "time", now)
    return now


def completions(messages, requests):
    """Request → what vLLM's own front end returns for it in the end."""
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

    front = OutputProcessor(None, log_stats=False)
    queues = {}
    for one in requests:
        queues[one.request_id] = RequestOutputCollector(
            one.sampling_params.output_kind, one.request_id
        )
        core = EngineCoreRequest(
            one.request_id, [1, 2], None, one.sampling_params, None, 0.0, None, None, None,
            external_req_id=one.request_id,
        )  # fmt: skip
        front.add_request(core, None, queue=queues[one.request_id])
    for _, message in messages:
        front.process_outputs(message.outputs, weight_version=message.weight_version)
    found = {}
    for name, queue in queues.items():
        last = queue.get_nowait()
        assert last is not None and last.finished, name
        (one,) = last.outputs
        found[name] = (
            list(one.token_ids),
            list(one.logprobs.logprobs),
            [(span.version, span.start, span.end) for span in one.weight_versions],
            one.finish_reason,
        )
    return found


@pytest.mark.parametrize("seed", range(20))
def test_the_front_end_returns_the_same_completions(step, clock, seed):
    """Random lengths, starts, pauses, versions, also without a pause, and widths of log-probs."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.engine import EngineCoreOutputs, FinishReason
    from vllm.v1.metrics.stats import PrefillStats

    choose = random.Random(seed)
    requests = [request(f"r{i}", RequestOutputKind.FINAL_ONLY) for i in range(12)]
    left = {one.request_id: choose.randint(1, 40) for one in requests}
    waiting, running, version = list(requests), {}, 0
    held, plain = Engine(), Engine()
    rng, same = np.random.default_rng(seed), np.random.default_rng(seed)

    def made(draw):
        outputs = [
            output(name, tokens, draw, finish, columns, **fields)
            for name, tokens, finish, fields in made_now
        ]
        return {0: EngineCoreOutputs(outputs=outputs, weight_version=VERSIONS[version])}

    started = set()
    while waiting or running:
        if waiting and choose.random() < 0.3:
            one = waiting.pop()
            running[one.request_id] = one
        if choose.random() < 0.05 and version < 2:
            version += 1
        paused = choose.random() < 0.1
        held.scheduler.pause_state = PauseState.PAUSED_ALL if paused else PauseState.UNPAUSED
        columns = choose.choice((1, 1, 6))
        made_now = []
        for name in list(running):
            tokens = [choose.randint(3, 90) for _ in range(choose.choice((0, 1, 1, 1, 2)))]
            tokens = tokens[: left[name]]
            left[name] -= len(tokens)
            if tokens:
                finish = None if left[name] else choose.choice(tuple(FinishReason)[:2])
                fields = {} if name in started else {"prefill_stats": PrefillStats()}
                started.add(name)
                made_now.append((name, tokens, finish, fields))
                if finish is not None:
                    del running[name]
        held.scheduler.requests = dict(running)
        clock.s += STEP_S
        if made_now:
            held.process(step, made(rng))
            plain.messages += made(same).items()
    assert completions(held.messages, requests) == completions(plain.messages, requests)
    assert len(held.messages) < len(plain.messages)


def one_step(engine, step, outputs, **fields):
    """Run a step. Returns the outputs of what the engine sends, and None for no message."""
    from vllm.v1.engine import EngineCoreOutputs

    before = len(engine.messages)
    engine.process(step, {0: EngineCoreOutputs(outputs=outputs, **fields)})
    sent = [message for _, message in engine.messages[before:]]
    return [one for message in sent for one in message.outputs] if sent else None


@pytest.fixture
def engine(step, clock):
    """An engine that has just sent everything."""
    from asyncrl.generation.held_outputs import HOLD_S

    engine = Engine()
    clock.s += HOLD_S
    assert one_step(engine, step, []) == []
    return engine


def whole(*names):
    """Unfinished requests for completions that are returned whole."""
    from vllm.sampling_params import RequestOutputKind

    return {name: request(name, RequestOutputKind.FINAL_ONLY) for name in names}


def test_tokens_wait_no_longer_than_the_limit(engine, step, clock):
    from asyncrl.generation.held_outputs import HOLD_S

    rng, since, waited, tokens = np.random.default_rng(0), None, [], []
    engine.scheduler.requests = whole("a")
    for number in range(40):
        clock.s += STEP_S
        since = clock.s if since is None else since
        if (sent := one_step(engine, step, [output("a", [number], rng)])) is not None:
            tokens += sent[0].new_token_ids
            waited.append(clock.s - since)
            since = None
    assert 0 < max(waited) < HOLD_S + STEP_S
    assert tokens == list(range(len(tokens))) and len(waited) < 14


def test_the_first_tokens_after_a_quiet_time_or_a_pause_do_not_wait(engine, step, clock):
    from asyncrl.generation.held_outputs import HOLD_S

    rng = np.random.default_rng(0)
    engine.scheduler.requests = whole("a")
    assert one_step(engine, step, [output("a", [3], rng)]) is None
    clock.s += HOLD_S
    assert one_step(engine, step, [output("a", [4], rng)])[0].new_token_ids == [3, 4]
    clock.s += 10 * HOLD_S
    assert one_step(engine, step, [output("a", [5], rng)])[0].new_token_ids == [5]
    assert one_step(engine, step, [output("a", [6], rng)]) is None
    pause(engine)
    assert one_step(engine, step, [output("a", [7], rng)])[0].new_token_ids == [7]


def pause(engine):
    from vllm.v1.core.sched.interface import PauseState

    from asyncrl.generation.held_outputs import holding

    state, engine.scheduler.pause_state = engine.scheduler.pause_state, PauseState.PAUSED_ALL
    one_step(engine, holding(lambda engine: (engine.made, False)), [])
    engine.scheduler.pause_state = state


def test_what_a_client_waits_for_is_sent_at_once(engine, step):
    """Streams, completions with stop strings, and outputs with more than tokens."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType
    from vllm.v1.metrics.stats import PrefillStats

    rng = np.random.default_rng(0)
    engine.scheduler.requests = whole("first", "preempted", "whole") | {
        "stream": request("stream", RequestOutputKind.DELTA),
        "cumulative": request("cumulative", RequestOutputKind.CUMULATIVE),
        "stops": request("stops", RequestOutputKind.FINAL_ONLY, stop=["x"]),
    }
    event = EngineCoreEvent.new_event(EngineCoreEventType.PREEMPTED)
    outputs = [
        output("stream", [3], rng),
        output("cumulative", [3], rng),
        output("stops", [3], rng),
        output("first", [3], rng, prefill_stats=PrefillStats()),
        output("preempted", [3], rng, events=[event]),
        output("whole", [3], rng),
    ]
    sent = one_step(engine, step, outputs)
    assert [one.request_id for one in sent] == [
        "stream", "cumulative", "stops", "first", "preempted"
    ]  # fmt: skip


def test_the_last_statistics_come_although_all_requests_were_aborted(engine, step):
    """Otherwise an idle engine would look busy until its next request."""
    from vllm.v1.metrics.stats import SchedulerStats

    engine.scheduler.requests = whole("a", "b")
    rng = np.random.default_rng(0)
    outputs = [output("a", [3], rng), output("b", [3], rng)]
    assert one_step(engine, step, outputs, scheduler_stats=SchedulerStats(2)) is None
    engine.scheduler.requests = whole("b")
    assert one_step(engine, step, [], scheduler_stats=SchedulerStats(1)) is None
    engine.scheduler.requests = {}
    assert one_step(engine, step, [], scheduler_stats=SchedulerStats(0)) == []
    assert engine.messages[-1][1].scheduler_stats.num_running_reqs == 0


@pytest.fixture
def patched(monkeypatch):
    """vLLM's class of an engine's process, whose changes are undone."""
    from vllm.v1.engine.core import EngineCoreProc

    for name in ("step", "step_with_batch_queue", "pause_scheduler"):
        monkeypatch.setattr(EngineCoreProc, name, getattr(EngineCoreProc, name))
    monkeypatch.setattr(EngineCoreProc, "step", lambda engine: (engine.made, True))
    monkeypatch.setattr(
        EngineCoreProc, "pause_scheduler", lambda engine, mode: engine.put_nowait(mode)
    )
    monkeypatch.setenv(OWNED, "1")
    return EngineCoreProc


def test_a_pause_sends_everything(patched, engine):
    from asyncrl.generation.held_outputs import hold_outputs

    hold_outputs()
    ours = patched.step
    hold_outputs()
    assert patched.step is ours, "a second call has no effect"
    engine.scheduler.requests = whole("a")
    del engine.messages[:]
    rng = np.random.default_rng(0)
    assert one_step(engine, ours, [output("a", [3], rng)]) is None
    assert one_step(engine, ours, [output("a", [4], rng)]) is None
    patched.pause_scheduler(engine, "keep")
    (client, message), mode = engine.messages
    assert client == 0 and message.outputs[0].new_token_ids == [3, 4] and mode == "keep"
    patched.pause_scheduler(engine, "keep")
    assert engine.messages[2:] == ["keep"], "nothing is sent twice"


def test_another_program_with_vllm_stays_as_it_is(patched, monkeypatch):
    from asyncrl.generation.held_outputs import hold_outputs

    before = patched.step
    monkeypatch.delenv(OWNED)
    hold_outputs()
    assert patched.step is before
    monkeypatch.setenv(OWNED, "1")
    monkeypatch.delitem(sys.modules, "vllm.v1.engine.core")
    hold_outputs()
    assert patched.step is before and "vllm.v1.engine.core" not in sys.modules


def test_the_fields_of_an_output_are_those_that_the_plugin_knows():
    """A new field of vLLM may be one that must not wait."""
    from vllm.v1.engine import EngineCoreOutput

    assert EngineCoreOutput.__struct_fields__ == (
        "request_id", "new_token_ids", "new_logprobs", "new_prompt_logprobs_tensors",
        "pooling_output", "finish_reason", "stop_reason", "events", "kv_transfer_params",
        "ec_transfer_params", "trace_headers", "prefill_stats", "routed_experts",
        "num_nans_in_logits", "mm_cache_miss_hashes", "new_sampling_mask", "spec_decode_metrics",
        "prompt_token_id_logprobs",
    )  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_engine_loads_the_plugin(device):
    from asyncrl.generation.held_outputs import hold_outputs

    (plugin,) = entry_points(group="vllm.general_plugins", name="asyncrl_outputs")
    assert plugin.load() is hold_outputs
    assert plugin.name in engine_environment(device)["VLLM_PLUGINS"].split(",")
