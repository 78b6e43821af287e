"""What TRL computes in the cases of `agreement_cases.py`, in plain torch: no TRL and no asyncrl.

- A step has `micro_batches` micro-batches with equal numbers of rows. Sequences are padded on the
  right. There is no BOS token, and the EOS token is a target.
- SFT: the sum over the target tokens of a micro-batch, divided by the target tokens of the whole
  step. The micro-batches' losses are added.
- Preference losses: the mean over the pairs (or rows) of a micro-batch. The step's loss is the mean
  of its micro-batches. An added SFT loss is the token mean of each micro-batch.
- The reference is the initial model, with the same masks.
- KTO's KL estimate pairs each prompt with the completion of the row before it in its micro-batch,
  and is not negative.
- The gradient norm is over all parameters, a tied one counted once. Clipping multiplies the
  gradient by max_grad_norm / (norm + 1e-6) where that is below 1.
- AdamW decays matrices and embeddings but no norms.
- A linear schedule trains step k with learning_rate * (1 - k / steps).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from agreement_cases import (
    ADAM_BETAS,
    ADAM_EPS,
    BATCH,
    PAD,
    STEPS,
    Case,
    Pair,
    SftRow,
    Unpaired,
    pairs,
    sft_rows,
    unpaired,
)
from torch import Tensor
from torch.nn.functional import logsigmoid, relu, sigmoid
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

Metrics = dict[str, float]


def plain_loop(case: Case, path: Path) -> dict[str, list[float]]:
    """Train the case from the checkpoint at `path`. Returns columns as the records have them."""
    model, reference = load(path), load(path)
    optimizer = make_optimizer(case, model)
    rows, loss_of = ROWS[case.trainer](case), LOSSES[case.trainer]
    size = BATCH // case.micro_batches
    columns: dict[str, list[float]] = defaultdict(list)
    for step in range(STEPS):
        rate = learning_rate_of(case, step)
        batch = rows[step * BATCH : (step + 1) * BATCH]
        found: dict[str, float] = defaultdict(float)
        for start in range(0, BATCH, size):
            loss, metrics = loss_of(case, model, reference, batch[start : start + size], batch)
            loss.backward()
            for name, value in ({"loss": float(loss.detach())} | metrics).items():
                found[name] += value
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        for name, value in {**found, "grad_norm": float(norm), "learning_rate": rate}.items():
            columns[name].append(value)
    return dict(columns)


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def make_optimizer(case: Case, model: Any) -> torch.optim.Optimizer:
    groups = [
        {
            "params": [one for one in model.parameters() if (one.dim() > 1) == matrices],
            "weight_decay": case.weight_decay if matrices else 0.0,
        }
        for matrices in (True, False)
    ]
    if case.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.0)
    return torch.optim.AdamW(groups, lr=0.0, betas=ADAM_BETAS, eps=ADAM_EPS)


def learning_rate_of(case: Case, step: int) -> float:
    return case.learning_rate * (1 - step / STEPS if case.schedule == "linear" else 1.0)


def logprobs(
    model: Any, sequences: Sequence[tuple[Sequence[int], Sequence[bool]]]
) -> tuple[Tensor, Tensor]:
    """Log-probs of each sequence's target tokens, and where they are: both [B, T - 1]."""
    ids = pad_sequence([torch.tensor(ids) for ids, _ in sequences], True, PAD)
    real = pad_sequence([torch.ones(len(ids), dtype=torch.long) for ids, _ in sequences], True)
    mask = pad_sequence([torch.tensor(mask) for _, mask in sequences], True)[:, 1:]
    logits = model(ids, attention_mask=real).logits[:, :-1]
    taken = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return taken * mask, mask


def completion(prompt: Sequence[int], ids: Sequence[int]) -> tuple[list[int], list[bool]]:
    """A sequence whose targets are the completion."""
    return [*prompt, *ids], [False] * len(prompt) + [True] * len(ids)


def sft_loss(
    case: Case, model: Any, reference: Any, rows: Sequence[SftRow], step: Sequence[SftRow]
) -> tuple[Tensor, Metrics]:
    targets = sum(sum(row.mask[1:]) for row in step)
    found, _ = logprobs(model, [(row.ids, row.mask) for row in rows])
    return -found.sum() / targets, {}


def pair_loss(
    case: Case, model: Any, reference: Any, rows: Sequence[Pair], step: Sequence[Pair]
) -> tuple[Tensor, Metrics]:
    """Chosen sequences first, as one padded batch with the rejected ones."""
    sequences = [completion(pair.prompt, pair.chosen) for pair in rows]
    sequences += [completion(pair.prompt, pair.rejected) for pair in rows]
    found, mask = logprobs(model, sequences)
    sums, counts = found.sum(1), mask.sum(1)
    kinds, beta = case.trl["loss_type"], case.trl["beta"]
    if kinds == "simpo":
        chosen, rejected = (sums / counts).chunk(2)
        losses = -logsigmoid(beta * (chosen - rejected) - case.trl["simpo_gamma"])
        return losses.mean() / case.micro_batches, pair_metrics(
            case, beta * chosen, beta * rejected, chosen, rejected
        )
    with torch.no_grad():
        ratios = -logprobs(reference, sequences)[0].sum(1)
    ratios = ratios + sums
    loss = torch.zeros(())
    for kind, weight in zip(kinds, case.trl.get("loss_weights") or [1.0], strict=True):
        chosen_tokens, count = (values.chunk(2)[0].sum() for values in (found, mask))
        delta, normalized = (
            one - other for one, other in (ratios.chunk(2), (ratios / counts).chunk(2))
        )
        smoothing = case.trl.get("label_smoothing", 0.0)
        losses = {
            "sigmoid": lambda x=delta: -logsigmoid(beta * x),
            "aot": lambda x=delta, smooth=smoothing: (
                -(1 - smooth) * logsigmoid(beta * x) - smooth * logsigmoid(-beta * x)
            ),
            "ipo": lambda x=normalized: (x - 1 / (2 * beta)) ** 2,
            "hinge": lambda x=delta: relu(1 - beta * x),
            "sigmoid_norm": lambda x=normalized: -logsigmoid(beta * x),
            "sft": lambda tokens=chosen_tokens, number=count: -tokens / number,
        }[kind]()
        loss = loss + weight * losses.mean()
    rewards, values = (beta * ratios).chunk(2), sums.chunk(2)
    return loss / case.micro_batches, pair_metrics(case, *rewards, *values)


def pair_metrics(
    case: Case, chosen: Tensor, rejected: Tensor, chosen_logps: Tensor, rejected_logps: Tensor
) -> Metrics:
    """This micro-batch's part of the step's metrics."""
    values = {
        "rewards/accuracies": (chosen > rejected).float(),
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "logps/chosen": chosen_logps,
        "logps/rejected": rejected_logps,
    }
    return {
        name: float(value.detach().mean()) / case.micro_batches for name, value in values.items()
    }


def unpaired_loss(
    case: Case, model: Any, reference: Any, rows: Sequence[Unpaired], step: Sequence[Unpaired]
) -> tuple[Tensor, Metrics]:
    own = [completion(row.prompt, row.completion) for row in rows]
    others = [
        completion(row.prompt, before.completion)
        for row, before in zip(rows, [rows[-1], *rows[:-1]], strict=True)
    ]
    sums = logprobs(model, own)[0].sum(1)
    with torch.no_grad():
        ratios = -logprobs(reference, own)[0].sum(1)
        kl = (logprobs(model, others)[0] - logprobs(reference, others)[0]).sum(1).mean()
        kl = kl.clamp(min=0)
    ratios = ratios + sums
    good = torch.tensor([row.label for row in rows])
    beta = case.trl["beta"]
    losses = torch.where(
        good,
        case.trl["desirable_weight"] * (1 - sigmoid(beta * (ratios - kl))),
        case.trl["undesirable_weight"] * (1 - sigmoid(beta * (kl - ratios))),
    )
    values = {
        f"{name}/{side}": float(of[where].detach().mean())
        for name, of in (("rewards", beta * ratios), ("logps", sums))
        for side, where in (("chosen", good), ("rejected", ~good))
    }
    margin = values["rewards/chosen"] - values["rewards/rejected"]
    return losses.mean(), values | {"rewards/margins": margin, "kl": float(kl)}


ROWS: dict[str, Callable[[Case], Sequence[Any]]] = {
    "sft": lambda case: sft_rows(case.rows),
    "dpo": lambda case: pairs(),
    "cpo": lambda case: pairs(),
    "kto": lambda case: unpaired(),
}
LOSSES: dict[str, Callable[..., tuple[Tensor, Metrics]]] = {
    "sft": sft_loss,
    "dpo": pair_loss,
    "cpo": pair_loss,
    "kto": unpaired_loss,
}
