"""Makes the table of docs/reference/models.md: model families in the learner and in vLLM.

Each family is a tiny random checkpoint.

    python -m benchmarks.model_table [--families NAME ...] [--no-engines] [--write]

Every family of `benchmarks.families` goes through these checks:

- load: how `asyncrl plan` would train it: packed, one trajectory at a time, or refused.
- isolation: the check at a learner's start that trajectories do not see each other or look ahead.
- plain: log-probs and gradients of five trajectories in the learner and in transformers alone.
- train: log-probs of the policy in train mode and in eval mode.
- names: the published tensors and those in the checkpoint's files, one by one.
- vLLM, for the families of `ENGINES`: the log-probs of vLLM's samples and the learner's. Before
  that, every parameter is changed, and vLLM loads the published version as in a run.

Exits with 1 if a family misses a bar. `--write` puts the table into docs/reference/models.md,
between its two marks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.families import FAMILIES, VOCABULARY, Family, family

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "models.md"
BEGIN, END = "<!-- made by: python -m benchmarks.model_table --write -->", "<!-- end -->"

UNSERVED: Mapping[str, str] = {
    "apertus": "no: differs by 4e-03 nats, as its activation's parameters are bfloat16 there",
    "bamba": "no: does not load",
    "cohere2": "no: differs by 0.1 nats beyond its window, which is a token longer there",
    "deepseek_v2": "no: differs by 0.7 nats at the published head sizes",
    "deepseek_v3": "no: differs by 0.7 nats at the published head sizes",
    "ernie4_5": "no: differs by 1.5 nats",
    "ernie4_5_moe": (
        "no: differs by 0.5 nats, as its experts are chosen without their correction bias there"
    ),
    "gemma3": "no: wants an image processor",
    "jamba": "no: has no selective scan",
    "lfm2": "no: differs by 0.9 nats, as its queries are turned by other positions there",
    "minimax_m2": "no: fails in its first forward",
    "nemotron_h": "no: has no experts without a gate",
    "phimoe": "no: differs by 0.3 nats, as its head has no bias there",
    "qwen3_5_text": "no: does not load a checkpoint of text alone",
    "qwen3_next": "no: computes in bfloat16 alone",
}
"""Families that vLLM 0.32.0 on CPU does not serve like the learner in float32. They are only
checked on the learner's side. `asyncrl.generation.served` refuses those that a run could use."""

ENGINES = tuple(name for name in FAMILIES if name not in UNSERVED)
"""Families that also go through vLLM."""

LENGTHS = (3, 5, 17, 17, 40)
"""Tokens of the trajectories in the comparison with transformers."""
SAME = 2e-5
"""Nats, and shares of the largest gradient: the rounding between two float32 computations."""
ENGINE_SAME = 1e-4
"""Nats between vLLM's kernels and the learner's: `weights.logprob_tolerance` in float32."""
NOISE = 0.05
"""Standard deviation of the noise added to each parameter before publication."""
PROMPTS, TOKENS, LONGEST = 4, 24, 64
UPDATE = "update.json"
"""File next to a checkpoint with the update that vLLM loads."""
ENGINE_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Row:
    """The results of one family. Numbers are largest differences; None if not measured."""

    name: str
    title: str
    mode: str
    """packed, one at a time, or refused."""
    reason: str = ""
    """Why not packed."""
    plain: float | None = None
    """Nats from transformers' log-probs."""
    gradient: float | None = None
    """From transformers' gradients, as a share of the largest one."""
    train: float | None = None
    """Nats between train and eval mode."""
    names: int | None = None
    """Tensors published under the checkpoint's names, each equal to the file's."""
    engine: float | None = None
    """Nats between vLLM after an update of every parameter, and the learner."""
    note: str = ""
    """What failed, or why vLLM was left out."""

    def missed(self) -> str:
        """The bar that this family misses; empty if none."""
        if self.note and self.mode != "refused":
            return self.note
        bars = (("plain", SAME), ("gradient", 10 * SAME), ("train", 0.0), ("engine", ENGINE_SAME))
        over = [
            f"{name} {getattr(self, name):.1e}"
            for name, bar in bars
            if getattr(self, name) is not None and not getattr(self, name) <= bar
        ]
        return ", ".join(over)


def learner_row(made: Family, folder: Path) -> Row:
    """All checks except vLLM's. `folder` contains the checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM

    from asyncrl.models import check_isolation, load_policy, support

    found = support(json.loads((folder / "config.json").read_text()))
    row = Row(
        made.name,
        made.title,
        {"rows": "packed", "none": "one at a time", None: "refused"}[found.packing],
        found.reason,
    )
    if found.packing is None:
        return row
    try:
        policy = load_policy(str(folder), torch.float32, 1.0)
        check_isolation(policy, VOCABULARY, "cpu", torch.float32, made.name, policy.packing)
    except ValueError as error:
        return replace(row, note=str(error))
    draw = np.random.default_rng(0)
    ids = [draw.integers(4, 260, length).tolist() for length in LENGTHS]
    plain = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return _with_names(_compared(row, policy, plain, ids), folder, policy.model)


def _compared(row: Row, policy: Any, plain: Any, ids: Sequence[list[int]]) -> Row:
    """The row with the differences between the policy's log-probs and gradients, and those of
    transformers' model. Both get gradients."""
    import torch

    ours, theirs = _of_policy(policy, ids), _of_plain(plain, ids)
    for logprobs in (ours, theirs):
        logprobs.sum().backward()
    gradients = dict(plain.named_parameters())
    largest = max(
        float(parameter.grad.abs().max())
        for parameter in gradients.values()
        if parameter.grad is not None
    )
    off = [
        _furthest(one.grad, gradients[name].grad)
        for name, one in policy.model.named_parameters()
        if gradients[name].grad is not None
    ]
    with torch.no_grad():
        in_train_mode = _of_policy(policy, ids) if policy.train() else None
        in_eval_mode = _of_policy(policy, ids) if policy.eval() else None
    return replace(
        row,
        plain=_furthest(ours, theirs),
        gradient=max(off) / largest,
        train=_furthest(in_train_mode, in_eval_mode),
    )


def _of_policy(policy: Any, ids: Sequence[list[int]]) -> torch.Tensor:
    """The policy's log-probs of all tokens but the first ones, in the order of the sequences."""
    import torch

    from asyncrl.models import micro_batch, token_example

    examples = [token_example((tokens[:1], tokens[1:])) for tokens in ids]
    every = list(range(len(ids)))
    together = [every] if policy.packing == "rows" else [[index] for index in every]
    logprobs: dict[int, torch.Tensor] = {}
    for indices in together:
        batch = micro_batch(examples, indices, "cpu")
        logprobs |= dict(zip(batch.order, policy(batch)[0].split(list(batch.counts)), strict=True))
    return torch.cat([logprobs[index] for index in every])


def _of_plain(plain: Any, ids: Sequence[list[int]]) -> torch.Tensor:
    """The same log-probs by transformers' model, one sequence at a time."""
    import torch

    rows = [torch.tensor([tokens]) for tokens in ids]
    return torch.cat(
        [
            plain(input_ids=row, use_cache=False)
            .logits[0, :-1]
            .log_softmax(-1)
            .gather(1, row[0, 1:, None])[:, 0]
            for row in rows
        ]
    )


def _furthest(one: Any, other: Any) -> float:
    return float("inf") if one is None else float((one - other).detach().abs().max())


def _with_names(row: Row, folder: Path, model: Any) -> Row:
    from safetensors.torch import load_file

    from asyncrl.weights import CannotPublishError

    stored = {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    try:
        published = version_tensors(folder, model)
    except CannotPublishError as error:
        return replace(row, note=f"cannot be published: {error}")
    import torch

    wrong = sorted({*stored} ^ {*published}) or [
        name for name in stored if not torch.equal(stored[name], published[name])
    ]
    return replace(
        row,
        names=len(published),
        note=f"{wrong[0]!r} is published with other values than the file" if wrong else "",
    )


def version_tensors(folder: Path, model: Any) -> dict[str, Any]:
    """Every tensor of a version by its name in the checkpoint: from the model's parameters, or else
    from the checkpoint's file."""
    import torch
    from safetensors import safe_open

    from asyncrl.weights import version_table

    parameters = {
        name: parameter.detach().contiguous().reshape(-1)
        for name, parameter in model.named_parameters()
    }
    found = {}
    for tensor in version_table(folder).tensors:
        if not tensor.pieces:
            with safe_open(tensor.stored.file, framework="pt") as file:
                found[tensor.name] = file.get_tensor(tensor.name)
            continue
        target = torch.full((tensor.stored.elements,), float("nan"))
        for piece in tensor.pieces:
            source = parameters[piece.parameter].as_strided(piece.shape, piece.strides, piece.start)
            target.as_strided(piece.shape, piece.to_strides, piece.to).copy_(source)
        found[tensor.name] = target.view(tensor.stored.shape)
    return found


def disturbed(path: Path) -> Any:
    """The policy of a checkpoint with every parameter changed. Its version is written next to the
    checkpoint, for vLLM to load."""
    import torch

    from asyncrl.models import load_policy

    policy = load_policy(str(path), torch.float32, 1.0)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * NOISE)
    (path / UPDATE).write_text(
        json.dumps(staged(version_tensors(path, policy.model), path / "version.bin"))
    )
    return policy


def print_samples(names: Sequence[str], folder: Path) -> None:
    """Print what vLLM samples from each family after its update, one line of JSON each. vLLM is
    imported once for all families."""
    from vllm.model_executor.models import registry

    # vLLM would inspect a model's class in a separate process, which imports everything again.
    registry._run_in_subprocess = lambda function: function()
    for name in names:
        try:
            result = {"samples": samples(folder / name)}
        except Exception as error:
            # The table shows the error of a family, and the next family is still measured.
            result = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        print(json.dumps({"engine": name} | result), flush=True)


def samples(path: Path) -> list[dict[str, Any]]:
    """Prompt, ids and log-probs of completions by vLLM after an update of every parameter."""
    import gc

    from vllm import LLM, SamplingParams
    from vllm.config import WeightTransferConfig
    from vllm.distributed import cleanup_dist_env_and_memory

    from asyncrl.weights import BACKEND

    llm = LLM(
        model=str(path),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=16 << 20,
        max_model_len=LONGEST,
        max_num_seqs=PROMPTS,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        load_format="safetensors",
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        seed=0,
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
    )
    try:
        llm.init_weight_transfer_engine({"init_info": {}})
        llm.start_weight_update()
        llm.update_weights({"update_info": json.loads((path / UPDATE).read_text())})
        llm.finish_weight_update("1")
        prompts = [[4 + 7 * place, 30 + place, 90] for place in range(PROMPTS)]
        settings = SamplingParams(
            temperature=1.0,
            max_tokens=TOKENS,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            seed=1,
        )
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], settings, use_tqdm=False
        )
        found = []
        for prompt, output in zip(prompts, outputs, strict=True):
            ids = list(output.outputs[0].token_ids)
            logprobs = [
                known[token].logprob
                for token, known in zip(ids, output.outputs[0].logprobs, strict=True)
            ]
            found.append({"prompt": prompt, "ids": ids, "logprobs": logprobs})
        return found
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def from_learner(policy: Any, found: Sequence[Mapping[str, Any]]) -> float:
    """Largest difference between log-probs of vLLM's samples and the policy's own, in nats."""
    import torch

    from asyncrl.models import micro_batch, token_example

    worst = 0.0
    for sample in found:
        batch = micro_batch([token_example((sample["prompt"], sample["ids"]))], [0], "cpu")
        with torch.no_grad():
            worst = max(worst, _furthest(policy(batch)[0], torch.tensor(sample["logprobs"])))
    return worst


def staged(tensors: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Write a staging file as a replica does, and return vLLM's update for it."""
    places, offset = [], 0
    with path.open("wb") as file:
        for name, tensor in tensors.items():
            content = tensor.contiguous().numpy().tobytes()
            padding = -len(content) % 64
            file.write(content + b"\0" * padding)
            places.append(
                (name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), offset)
            )
            offset += len(content) + padding
    return {"path": str(path), "nbytes": offset, "tensors": places}


def in_engines(rows: Sequence[Row], names: Sequence[str], folder: Path) -> list[Row]:
    """The rows with vLLM's differences. vLLM runs in one separate process."""
    from asyncrl.generation import engine_environment

    served = [
        row.name for row in rows if row.name in names and not row.note and row.mode != "refused"
    ]
    if not served:
        return list(rows)
    policies = {name: disturbed(folder / name) for name in served}
    environment = (
        os.environ
        | engine_environment("cpu")
        | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "PYTHONPATH": str(ROOT),
        }
    )
    command = [
        sys.executable,
        "-m",
        "benchmarks.model_table",
        "--engines-in",
        str(folder),
        "--families",
        *served,
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=ENGINE_TIMEOUT_S,
        check=False,
    )
    results = {
        result["engine"]: result
        for result in map(
            json.loads, (line for line in done.stdout.splitlines() if line.startswith('{"engine"'))
        )
    }
    if missing := [name for name in served if name not in results]:
        raise RuntimeError(f"vLLM's process ended before {missing[0]}: {done.stderr[-2000:]}")
    measured_rows = []
    for row in rows:
        result = results.get(row.name)
        if result is not None and "error" in result:
            row = replace(row, note=f"vLLM: {result['error']}")
        elif result is not None:
            row = replace(row, engine=from_learner(policies[row.name], result["samples"]))
        measured_rows.append(row)
    return measured_rows


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown, with the reasons why some are trained one at a time."""
    reasons = sorted({row.reason for row in rows if row.reason})
    lines = [
        (
            "| family | `model_type` | trained | log-probs | gradients | train - eval | tensors |"
            " vLLM |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: row.title.lower()):
        trained = f"{row.mode} ({reasons.index(row.reason) + 1})" if row.reason else row.mode
        numbers = [
            _number(row.plain, " nats"),
            _number(row.gradient),
            _number(row.train, " nats"),
            str(row.names or ""),
        ]
        vllm = (
            row.note or UNSERVED.get(row.name, "left out")
            if row.engine is None
            else _number(row.engine, " nats")
        )
        model_type = f"`{FAMILIES[row.name].model_type}`"
        lines.append(f"| {' | '.join([row.title, model_type, trained, *numbers, vllm])} |")
    notes = [f"({number}) The model {reason}." for number, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", *(line for note in notes for line in (note, ""))]).rstrip()


def _number(value: float | None, unit: str = "") -> str:
    return "" if value is None else f"{value:.0e}{unit}" if value else f"0{unit}"


def write(rows: Sequence[Row]) -> None:
    """Put the table into the page, between its marks."""
    page = PAGE.read_text()
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n\n{table(rows)}\n\n{END}{tail}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.model_table", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), metavar="NAME")
    parser.add_argument("--no-engines", action="store_true", help="leave vLLM out")
    parser.add_argument(
        "--write", action="store_true", help=f"put the table into {PAGE.relative_to(ROOT)}"
    )
    parser.add_argument("--engines-in", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.engines_in:
        print_samples(options.families, options.engines_in)
        return 0
    rows = measured(options.families, () if options.no_engines else ENGINES)
    print(table(rows))
    if options.write:
        write(rows)
    missed = {row.name: row.missed() for row in rows if row.missed()}
    for name, what in missed.items():
        print(f"MISSED {name}: {what}")
    return int(bool(missed))


def measured(names: Sequence[str], engines: Sequence[str]) -> list[Row]:
    """The rows of these families. Those in `engines` also go through vLLM."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="asyncrl_models_") as place:
        folder = Path(place)
        rows = [learner_row(family(name), family(name).save(folder / name)) for name in names]
        return in_engines(rows, engines, folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
