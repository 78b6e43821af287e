"""Sessions of three turns on a real replica, with real environment processes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from session_turns import sampled_turns, worst_difference

from asyncrl.config import Config
from asyncrl.contracts.group_table import table_from_ipc
from asyncrl.contracts.rows import Prompt
from asyncrl.generation.app import ServeGenerate
from asyncrl.preflight.specs import worker_spec
from asyncrl.rollout.worker import RolloutWorker
from asyncrl.text.tokenizer import load_tokenizer
from asyncrl.weights.push import ServeWeightSync

SAMPLES, TURN_TOKENS = 4, 12
TEMPLATE = """\
{%- for message in messages -%}
{{ message.role + ':' + message.content + eos_token + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant:' }}{%- endif -%}
"""


@pytest.fixture
def chat_model(tiny_model: Path, tmp_path: Path) -> Path:
    """The checkpoint of the replica, with a chat template."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    tokenizer: Any = load_tokenizer(str(folder))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.timeout(300)
async def test_sessions_record_what_the_engine_sampled(
    generators: Any,
    publish: Any,
    load_reference: Any,
    chat_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each turn has the template's tokens before it, the log-probs of transformers, and the version
    that sampled it. Later turns reuse the engine's cache. A failed session is recorded, too."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "jobs"))
    version = generators.next_version()
    weights = dict(load_reference(chat_model).named_parameters())
    sync = ServeWeightSync(generators.handle, generators.registry, push_timeout_s=60)
    await sync.push(publish(weights, version=version))
    config = Config.model_validate(
        {
            "name": "worker",
            "max_steps": 1,
            "model": {"path": str(chat_model)},
            "data": {"train": "unused", "max_length": 160},
            "environment": {"function": "environments_for_runs:three_questions", "processes": 1},
            "rollout": {"n_samples_per_prompt": SAMPLES, "max_completion_length": TURN_TOKENS},
        }
    )
    handle = ServeGenerate(generators.handle)
    worker = RolloutWorker(worker_spec(config, "test", 1, lambda: handle))
    await worker.ready()
    try:
        for ordinal, hidden in enumerate((1, 8)):
            await worker.rollout(
                Prompt(ordinal, 0, "", (4, 5), {"low": 20 + ordinal, "hidden": hidden}), version
            )
        stream = await worker.take("reader", 8, 1.0)
    finally:
        await worker.close()
    good, failed = table_from_ipc(cast("pa.Buffer", stream)).to_pylist()

    tokenizer: Any = load_tokenizer(str(chat_model))
    turns = sampled_turns(good)
    assert len(turns) == 3 * SAMPLES
    cut = 0
    for number, turn in enumerate(turns):
        asked = (str(good["low"]), "higher", "lower")[number % 3]
        ended = number % 3 and turns[number - 1].ids[-1] == tokenizer.eos_token_id
        closing = "\n" if ended else "<eos>\n"
        wanted = f"{closing if number % 3 else ''}user:{asked}<eos>\nassistant:"
        assert tokenizer.decode(good["turn_context"][number]) == wanted
        assert turn.versions == {version}
        cut += turn.ids[-1] != tokenizer.eos_token_id
    assert cut > 0, "the length limit cut no turn"
    assert len({tuple(turn.ids) for turn in turns}) > SAMPLES, "siblings are the same"
    assert worst_difference(chat_model, turns) <= 1e-4
    assert sum(good["session_cached"]) >= 0.9 * sum(good["session_reusable"]) > 0
    assert good["session_end"] == ["done"] * SAMPLES
    assert failed["session_end"] == ["env_error"] * SAMPLES
    assert "RuntimeError: this task fails" in failed["session_note"][0]
