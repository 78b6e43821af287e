"""Outputs that the engine holds: the front end makes the same completions from fewer messages."""

import random
from importlib.metadata import entry_points
from types import SimpleNamespace

import numpy as np
import pytest

from asyncrl.generation import engine_environment

VERSIONS = ("default", "1", "2")
STEP_S = 0.03


def request(name, kind, stop=()):
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=100, logprobs=0, flat_logprobs=True, detokenize=bool(stop), stop=list(stop)
    )
    params.output_kind = kind
    return SimpleNamespace(request_id=name, sampling_params=params)


def output(name, tokens, rng, finish=None, **fields):
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    shape = (len(tokens), 1)
    logprobs = LogprobsLists(
        np.array(tokens, np.int32).reshape(shape),
        -rng.random(shape).astype(np.float32),
        rng.integers(1, 9, len(tokens)).astype(np.int32),
    )
    return EngineCoreOutput(name, list(tokens), logprobs, finish_reason=finish, **fields)


class Engine:
    """What the plugin changes of an engine's process, with steps that a test gives it."""

    def __init__(self):
        from vllm.v1.core.sched.interface import PauseState

        self.scheduler = SimpleNamespace(pause_state=PauseState.UNPAUSED, requests={})
        self.output_queue = self
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

    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(held_outputs.time, "monotonic", lambda: now.s)
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
    """Random lengths, starts, pauses, and versions, also a version without a pause."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.engine import EngineCoreOutputs, FinishReason

    choose = random.Random(seed)
    requests = [request(f"r{i}", RequestOutputKind.FINAL_ONLY) for i in range(12)]
    left = {one.request_id: choose.randint(1, 40) for one in requests}
    waiting, running, version = list(requests), {}, 0
    held, plain = Engine(), Engine()
    rng, same = np.random.default_rng(seed), np.random.default_rng(seed)

    def made(draw):
        return {
            0: EngineCoreOutputs(
                outputs=[
                    output(name, tokens, draw, finish)
                    for name, tokens, finish in made_now
                ],
                weight_version=VERSIONS[version],
            )
        }  # fmt: skip

    while waiting or running:
        if waiting and choose.random() < 0.3:
            one = waiting.pop()
            running[one.request_id] = one
        if choose.random() < 0.05 and version < 2:
            version += 1
        paused = choose.random() < 0.1
        held.scheduler.pause_state = PauseState.PAUSED_ALL if paused else PauseState.UNPAUSED
        made_now = []
        for name in list(running):
            tokens = [choose.randint(3, 90) for _ in range(choose.choice((0, 1, 1, 1, 2)))]
            tokens = tokens[: left[name]]
            left[name] -= len(tokens)
            if tokens:
                finish = None if left[name] else choose.choice(tuple(FinishReason)[:2])
                made_now.append((name, tokens, finish))
                if finish is not None:
                    del running[name]
        held.scheduler.requests = dict(running)
        clock.s += STEP_S
        if made_now:
            held.process(step, made(rng))
            plain.messages += made(same).items()
    assert completions(held.messages, requests) == completions(plain.messages, requests)
    assert len(held.messages) < len(plain.messages)


def test_tokens_wait_no_longer_than_the_limit(step, clock):
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreOutputs

    from asyncrl.generation.held_outputs import HOLD_S

    engine, rng = Engine(), np.random.default_rng(0)
    engine.scheduler.requests = {"a": request("a", RequestOutputKind.FINAL_ONLY)}
    waited, since = [], 0.0
    for number in range(40):
        clock.s += STEP_S
        before = len(engine.messages)
        engine.process(step, {0: EngineCoreOutputs(outputs=[output("a", [number], rng)])})
        since = since or clock.s
        if len(engine.messages) > before:
            waited.append(clock.s - since)
            since = 0.0
    assert waited and max(waited) < HOLD_S + STEP_S
    tokens = [t for _, message in engine.messages for o in message.outputs for t in o.new_token_ids]
    assert tokens == list(range(len(tokens))) and len(engine.messages) < 12


def test_what_a_client_waits_for_is_sent_at_once(step, clock):
    """Streams, completions with stop strings, and outputs with more than tokens."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutputs
    from vllm.v1.metrics.stats import PrefillStats

    engine, rng = Engine(), np.random.default_rng(0)
    whole = RequestOutputKind.FINAL_ONLY
    engine.scheduler.requests = {
        "stream": request("stream", RequestOutputKind.DELTA),
        "cumulative": request("cumulative", RequestOutputKind.CUMULATIVE),
        "stops": request("stops", whole, stop=["x"]),
        "first": request("first", whole),
        "preempted": request("preempted", whole),
        "whole": request("whole", whole),
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
    engine.process(step, {0: EngineCoreOutputs(outputs=outputs)})
    ((_, message),) = engine.messages
    assert [one.request_id for one in message.outputs] == [
        "stream", "cumulative", "stops", "first", "preempted"
    ]  # fmt: skip


def test_a_pause_sends_everything(monkeypatch, clock):
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCoreProc

    from asyncrl.generation.held_outputs import hold_outputs

    for name in ("step", "step_with_batch_queue", "pause_scheduler"):
        monkeypatch.setattr(EngineCoreProc, name, getattr(EngineCoreProc, name))
    monkeypatch.setattr(EngineCoreProc, "step", lambda engine: (engine.made, True))
    monkeypatch.setattr(
        EngineCoreProc, "pause_scheduler", lambda engine, mode: engine.put_nowait(mode)
    )
    hold_outputs()
    ours = EngineCoreProc.step
    hold_outputs()
    assert EngineCoreProc.step is ours, "a second call has no effect"
    engine, rng = Engine(), np.random.default_rng(0)
    engine.scheduler.requests = {"a": request("a", RequestOutputKind.FINAL_ONLY)}
    engine.process(ours, {0: EngineCoreOutputs(outputs=[output("a", [3], rng)])})
    assert not engine.messages
    EngineCoreProc.pause_scheduler(engine, "keep")
    (client, message), mode = engine.messages
    assert client == 0 and message.outputs[0].new_token_ids == [3] and mode == "keep"
    EngineCoreProc.pause_scheduler(engine, "keep")
    assert engine.messages[2:] == ["keep"], "nothing is sent twice"


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
