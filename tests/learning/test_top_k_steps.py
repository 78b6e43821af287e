"""Distillation over top_k tokens: what the teacher's process returns, and policy steps of real
ZeRO-3 ranks against a plain loop over all logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from plain_ranks import on_ranks
from recorded import VOCABULARY, learner_config, recorded_group
from test_preference_steps import Watched, watched
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config import Config
from asyncrl.contracts.group_table import groups_to_table
from asyncrl.learning.examples.batches import examples_of, with_next_token
from asyncrl.learning.frozen.reference import Reference
from asyncrl.models.micro_batches import Example, micro_batch
from asyncrl.preflight.specs import learner_spec, reference_spec
from asyncrl.rewards.reference_rows import reference_rows
from asyncrl.rewards.score import attach_teacher

TOP_K = 4
COEF = 0.5
CASES = {"top_k": TOP_K, "all": VOCABULARY}
SETTINGS = {"optimizer": "sgd", "max_grad_norm": 1e6}


def config(
    path: Path, teacher: Path, world_size: int = 1, top_k: int = TOP_K, **changes: Any
) -> Config:
    distillation = {
        "teacher": str(teacher),
        "use": {"name": "top_k", "top_k": top_k, "coef": COEF},
    }
    algorithm = {"distillation": distillation}
    return learner_config(path, world_size, algorithm=algorithm, **(SETTINGS | changes))


@pytest.fixture(scope="module")
def teacher_path(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The student's model with changed weights, and ids that the student does not have."""
    path = tmp_path_factory.mktemp("teacher")
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model.resize_token_embeddings(VOCABULARY + 6)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(model_path).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tables(model_path: Path, teacher_path: Path) -> dict[str, list[pa.Table]]:
    """Groups with the teacher's answers, for each number of tokens."""
    found = {}
    for name, top_k in CASES.items():
        reference = Reference(reference_spec(config(model_path, teacher_path, top_k=top_k)))
        plain = [groups_to_table([recorded_group(ordinal)]) for ordinal in range(4)]
        answers = [reference.top_logprobs(reference_rows(table).rows) for table in plain]
        found[name] = [
            attach_teacher(table, [one.logprobs for one in answer], None, 0.1, answer)
            for table, answer in zip(plain, answers, strict=True)
        ]
    return found


def logprobs_of(model: Any, example: Example) -> torch.Tensor:
    """Log-probs [N, V] of transformers' own forward pass where the loss tokens are predicted."""
    tokens = torch.from_numpy(example.tokens)[None]
    at = example.prompt_length - 1 + np.flatnonzero(example.loss_mask)
    return model(input_ids=tokens).logits[0, at].log_softmax(-1)


def plain_step(
    path: Path, teacher_path: Path, tables: list[pa.Table], top_k: int
) -> tuple[float, dict[str, Any]]:
    """The step's loss and gradient with all logits, one trajectory at a time."""
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(
            place, dtype=torch.float32, attn_implementation="eager"
        )
        for place in (path, teacher_path)
    )
    terms = []
    for example in (example for table in tables for example in examples_of(table)):
        ours = logprobs_of(student, example)
        with torch.no_grad():
            theirs = logprobs_of(teacher, example)
        for row, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            own = int(example.tokens[example.prompt_length :][example.loss_mask][row])
            ranked = q[:VOCABULARY].argsort(descending=True).tolist()
            kept = [own, *[token for token in ranked if token != own][:top_k]]
            term = (p[kept].exp() * (p[kept] - q[kept])).sum()
            rest = [token for token in range(VOCABULARY) if token not in kept]
            if rest:
                tail = p[rest].exp().sum()
                others = [token for token in range(VOCABULARY + 6) if token not in kept]
                term = term + tail * (tail.log() - q[others].exp().sum().log())
            terms.append(term)
    loss = COEF * torch.stack(terms).mean()
    loss.backward()
    return loss.item(), {name: value.grad for name, value in student.named_parameters()}


def test_the_teacher_returns_its_most_probable_other_tokens(
    model_path: Path, teacher_path: Path
) -> None:
    reference = Reference(reference_spec(config(model_path, teacher_path)))
    rows = [((5, 6), (7, 8, 9)), ((5,), ()), ((10, 11, 12), tuple(range(13, 40)))]
    model = AutoModelForCausalLM.from_pretrained(teacher_path, dtype=torch.float32)
    answers, plain = reference.top_logprobs(rows), reference.logprobs(rows)
    for (prompt, following), answer, own in zip(rows, answers, plain, strict=True):
        np.testing.assert_allclose(answer.logprobs, own, atol=1e-6)
        assert answer.other_ids.shape == answer.other_logprobs.shape == (len(following), TOP_K)
        tokens = torch.tensor([[*prompt, *following]])
        with torch.no_grad():
            dense = model(input_ids=tokens).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        for place, token in enumerate(following):
            ranked = dense[place][:VOCABULARY].argsort(descending=True).tolist()
            assert answer.other_ids[place].tolist() == [at for at in ranked if at != token][:TOP_K]
            wanted = dense[place][answer.other_ids[place]]
            np.testing.assert_allclose(answer.other_logprobs[place], wanted, atol=1e-5)


def test_examples_have_the_teachers_tokens(tables: dict[str, list[pa.Table]]) -> None:
    examples = [example for table in tables["top_k"] for example in examples_of(table)]
    for example in examples:
        assert example.teacher_ids.shape == (len(example.loss_mask), TOP_K)
        assert example.teacher_logprobs.shape == example.teacher_ids.shape
        completion = example.tokens[example.prompt_length :]
        assert not (example.teacher_ids == completion[:, None]).any()
    batch = micro_batch(examples[:3], range(3), "cpu")
    assert batch.teacher_ids.shape == batch.teacher_logprobs.shape == (len(batch.targets), TOP_K)
    assert batch.teacher_ids.dtype == torch.int64
    first = examples[batch.order[0]]
    assert batch.teacher_ids[0].tolist() == first.teacher_ids[first.loss_mask][0].tolist()
    assert with_next_token(examples[0]).teacher_ids is None
    with pytest.raises(ValueError, match="has no tokens of the teacher"):
        micro_batch([examples[0], with_next_token(examples[1])], [0, 1], "cpu")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world_size", "size"),
    [
        (2, 1),
        pytest.param(1, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
    ],
    ids=["two ranks", "one rank", "a shared row"],
)
def test_steps_have_the_loss_and_gradient_of_a_plain_loop(
    world_size: int, size: int, model_path: Path, teacher_path: Path, tables: Any
) -> None:
    found = on_ranks(world_size, stepped, model_path, teacher_path, tables, size)[0]
    for case, top_k in CASES.items():
        loss, gradients = plain_step(model_path, teacher_path, tables[case], top_k)
        for cap in ("packed", "one trajectory"):
            step = found.steps[case, cap]
            assert step.metrics["loss"] == pytest.approx(loss, rel=1e-4), (case, cap)
            assert step.metrics["distill/top_k_kl"] * COEF == pytest.approx(loss, rel=1e-4)
            for name, gradient in step.gradients.items():
                wanted = gradients[name]
                assert wanted.abs().max() > 0
                torch.testing.assert_close(
                    gradient,
                    wanted,
                    rtol=0,
                    atol=1e-3 * wanted.abs().max().item(),
                    msg=f"{case} {name}",
                )
        micro_batches = [found.steps[case, cap].metrics["micro_batches"] for cap in CAPS]
        assert size > 1 or micro_batches[0] < micro_batches[1]
    first, last = found.learned[0], found.learned[-1]
    assert last["distill/top_k_kl"] < 0.8 * first["distill/top_k_kl"]
    assert 0 < last["distill/tail"] < first["distill/tail"] < 1
    assert found.steps["all", "packed"].metrics["distill/tail"] < 1e-6


CAPS = {"packed": (128, "rows"), "one trajectory": (128, "none")}


@dataclass(frozen=True)
class Observed:
    """What a rank computes."""

    steps: dict[tuple[str, str], Watched]
    """By case and cap."""
    learned: list[Mapping[str, float]]


def stepped(
    rank: int, world_size: int, path: Path, teacher: Path, tables: Any, size: int
) -> Observed:
    """Policy steps with learning rate 0, then five that learn."""
    from asyncrl.learning.engine.state import load_state
    from asyncrl.learning.rank import LearnerRank
    from asyncrl.learning.steps.policy_step import policy_step

    chosen = config(path, teacher, world_size, learning_rate=0.0, sequence_parallel_size=size)
    learner = LearnerRank(load_state(rank, learner_spec(chosen)), "run", 1)
    state, steps = learner.state, {}

    def step(case: str) -> dict[str, float]:
        result = policy_step(state, tables[case])
        assert result.applied
        return dict(result.metrics)

    for case in CASES:
        for cap, (_, packing) in CAPS.items():
            state.packing = packing if size == 1 else "rows"
            steps[case, cap] = watched(learner, partial(step, case))
    state.packing = "rows"
    learner.reset_optimizer(0.5, warmup_steps=0)
    learned = [policy_step(state, tables["top_k"]).metrics for _ in range(5)]
    state.engine.destroy()
    return Observed(steps, learned)
