"""Measures the learner on a GPU: the packed log-probs, the log-prob kernel, training steps beside a
plain loop, memory beside the estimate of `asyncrl plan`, and a gathered version.

    python -m benchmarks.learner_gpu [--device cuda] [--model qwen3_0.6b] [--parts …]
    [--rows 128] [--length 1024] [--rows_per_pass 16]

- isolation: log-probs and gradients of packed rows and of transformers' own attention, one row at a
  time, in float32 and bfloat16. Both are compared with float32. The first row's tokens are then
  changed: no other row may change.
- attention: time and memory of a float32 layer's attention, forward and backward, in rows of 512
  and of 4,096 tokens.
- head: time and memory of the log-probs and their backward pass, in chunks and with whole logits.
- steps: trained tokens per second. A step has `rows` rows of `length` + 1 tokens and
  `rows_per_pass` rows per forward pass. All rows have one length, so that no variant pads.
  `plain` is transformers and torch alone, without float32 master weights, and with half the rows
  per pass if it runs out of memory. `packed` is asyncrl's policy in the same loop. `learner` is the
  learner's own rank with DeepSpeed ZeRO-3. With `/checkpointed`, each
  layer is computed again in the backward pass.
- memory: the learner's rank at two sizes and two caps, beside the estimate.

Each measurement has its own process. The model is a seeded random Qwen3. Model FLOP/s count 6 per
weight of a matrix and token, and causal attention, and nothing that is computed again.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.learner import IDS, MASK, PROMPT, SEED

MODELS = {
    "tiny": (64, 128, 2, 4, 2, 16, 512),
    "qwen3_0.6b": (1024, 3072, 28, 16, 8, 128, 151_936),
    "qwen3_1.7b": (2048, 6144, 28, 16, 8, 128, 151_936),
}
"""Width, width of the MLP, layers, heads, heads of keys, width of a head, vocabulary."""
PEAK = 989e12
"""Dense bfloat16 FLOP/s of an H100 or H200 (SXM), from its data sheet."""
LEAST_OF_PLAIN = 0.9
STEPS = 3
"""Timed steps after a warm-up step. The fastest one counts."""
VARIANTS = (
    "plain",
    "packed",
    "learner",
    "plain/checkpointed",
    "learner/checkpointed",
)


def main(arguments: list[str]) -> int:
    """Measure and print. The exit code is 0 if the learner trains at least 0.9 times the tokens
    per second of the plain loop, with and without checkpointing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learner_gpu")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="qwen3_0.6b", choices=MODELS)
    parser.add_argument("--larger", default="qwen3_1.7b", choices=MODELS)
    parser.add_argument("--parts", default="isolation,attention,head,steps,memory")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rows_per_pass", type=int, default=16)
    parser.add_argument("--only", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.only:
        part, *rest = options.only
        print(json.dumps(PARTS[part](options, *rest)))
        return 0
    print(_machine(options.device), flush=True)
    parts = [part for part in options.parts.split(",") if part != "memory" or _is_gpu(options)]
    held = True
    with tempfile.TemporaryDirectory(prefix="asyncrl_bench_") as folder:
        for part in parts:
            print(f"\n# {part}", flush=True)
            if part == "steps":
                held = _compare_steps(options, arguments, folder)
            elif part == "memory":
                _compare_memory(options, arguments, folder)
            else:
                for name, value in _run(arguments, part).items():
                    print(f"{name:<44}{value:>14.6g}", flush=True)
    return 0 if held else 1


def _run(arguments: list[str], *only: str) -> dict:
    """One measurement in a separate process; {} if it failed, with its last lines printed."""
    command = [sys.executable, "-m", __spec__.name, *arguments, "--only", *only]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{' '.join(only)} failed:\n{done.stderr[-3000:]}", flush=True)
        return {}
    return json.loads(done.stdout.splitlines()[-1])


def _compare_steps(options: argparse.Namespace, arguments: list[str], folder: str) -> bool:
    path = _run(arguments, "model", options.model, folder)["path"]
    print(
        f"{'':<22}{'tokens/s':>10}{'TFLOP/s':>9}{'MFU':>7}{'step s':>8}{'loss':>9}"
        f"{'peak GiB':>10}{'rows a pass':>13}"
    )
    found = {}
    for variant in options.variants.split(","):
        result = _run(arguments, "step", variant, path)
        if not result:
            continue
        found[variant] = result
        flops = result["flops_per_token"] * result["tokens_per_s"]
        print(
            f"{variant:<22}{result['tokens_per_s']:>10,.0f}{flops / 1e12:>9.1f}"
            f"{flops / PEAK:>7.1%}{result['step_s']:>8.3f}{result['loss']:>9.4f}"
            f"{result['peak'] / 2**30:>10.2f}{result['rows_per_pass']:>13.0f}",
            flush=True,
        )
        for name in sorted(result.keys() & _PUBLISHED):
            print(f"    {name:<40}{result[name]:>14.6g}", flush=True)
    held = True
    for suffix in ("", "/checkpointed"):
        pair = [found.get(f"{variant}{suffix}") for variant in ("plain", "learner")]
        if all(pair):
            ratio = pair[1]["tokens_per_s"] / pair[0]["tokens_per_s"]
            held = held and ratio >= LEAST_OF_PLAIN
            print(f"learner{suffix}: {ratio:.3f} of plain (bar {LEAST_OF_PLAIN:g})")
    return held


def _compare_memory(options: argparse.Namespace, arguments: list[str], folder: str) -> None:
    print(
        "GiB. states: weights, gradients and optimizer between two steps. peak: of a step with"
        " checkpointing. The plan's total has a chunk of logits, and no activations"
    )
    print(
        f"{'model':<14}{'cap':>8}{'states':>10}{'plan':>9}{'plan/found':>12}{'peak':>9}"
        f"{'plan total':>12}{'plan/peak':>11}"
    )
    for model in dict.fromkeys((options.model, options.larger)):
        path = _run(arguments, "model", model, folder)["path"]
        for rows in (options.rows_per_pass // 2, options.rows_per_pass):
            sized = [*arguments, "--rows_per_pass", str(rows)]
            found, plan = _run(sized, "memory", path), _run(sized, "plan", path)
            if not found or not plan:
                continue
            states, peak = found["states"], found["peak"]
            planned, total = plan["plan_states"], plan["plan_total"]
            print(
                f"{model:<14}{rows * (options.length + 1):>8}{states / 2**30:>10.2f}"
                f"{planned / 2**30:>9.2f}{planned / states:>12.2f}{peak / 2**30:>9.2f}"
                f"{total / 2**30:>12.2f}{total / peak:>11.2f}",
                flush=True,
            )


def _isolation(options: argparse.Namespace) -> dict[str, float]:
    """Differences of packed rows from transformers' own attention, row by row."""
    import torch
    from transformers import AutoModelForCausalLM

    from asyncrl.models import load_policy, micro_batch, token_example

    changes = {"num_hidden_layers": min(4, MODELS[options.model][2]), "initializer_range": 0.06}
    found: dict[str, float] = {}
    generator = np.random.default_rng(SEED)
    vocabulary = MODELS[options.model][6]
    lengths = generator.integers(PROMPT + 1, options.length, 12)
    rows = [_row(generator, length, vocabulary) for length in lengths]
    examples = [token_example(row) for row in rows]
    with tempfile.TemporaryDirectory(prefix="asyncrl_bench_") as folder:
        path = _model(options.model, folder, **changes)
        exact: torch.Tensor | None = None
        exact_gradient: torch.Tensor | None = None
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            alone = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(options.device)
            order = micro_batch(examples, range(len(rows)), "cpu").order
            expected = []
            for index in order:
                tokens = torch.from_numpy(examples[index].tokens)[None].to(options.device)
                logits = alone(input_ids=tokens[:, :-1], use_cache=False).logits[0]
                of_row = logits.float().log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
                kept = of_row[PROMPT - 1 :]
                kept.sum().backward()
                expected.append(kept.detach())
            separate = torch.cat(expected)
            separate_gradient = _gradients(alone)
            del alone
            policy = load_policy(path, dtype, 1.0).to(options.device)
            batch = micro_batch(examples, range(len(rows)), options.device)
            logprobs = policy(batch)[0]
            logprobs.sum().backward()
            gradient = _gradients(policy.model)
            packed = logprobs.detach()
            if exact is None or exact_gradient is None:
                exact, exact_gradient = separate, separate_gradient
            for kind, values, gradients in (
                ("packed", packed, gradient),
                ("separate", separate, separate_gradient),
            ):
                found[f"{name} {kind}: largest error, nats"] = float((values - exact).abs().max())
                found[f"{name} {kind}: mean error, nats"] = float((values - exact).abs().mean())
                found[f"{name} {kind}: gradient error"] = float(
                    (gradients - exact_gradient).norm() / exact_gradient.norm()
                )
            first = order[0]
            changed = list(examples)
            others = generator.integers(0, vocabulary, len(examples[first].tokens)).tolist()
            changed[first] = token_example((others[:PROMPT], others[PROMPT:]))
            with torch.no_grad():
                before = policy(batch)[0][batch.counts[0] :]
                after = policy(micro_batch(changed, range(len(rows)), options.device))[0]
            leak = (after[batch.counts[0] :] - before).abs().max()
            found[f"{name} packed: leak between rows, nats"] = float(leak)
            del policy
    return found


def _gradients(model):
    """All gradients of a model, flat and in float32 on the CPU."""
    import torch

    return torch.cat([parameter.grad.flatten().float().cpu() for parameter in model.parameters()])


def _attention(options: argparse.Namespace) -> dict[str, float]:
    """One float32 layer's attention over 16 × `length` tokens: milliseconds and peak GiB."""
    import torch

    from asyncrl.models import Segments, segment_attention

    _, _, _, heads, kv_heads, width, _ = MODELS[options.model]
    tokens, found = 16 * options.length, {}
    for length in (min(512, tokens), min(4096, tokens)):
        segments = Segments.of([length] * (tokens // length), options.device)
        shapes = (heads, kv_heads, kv_heads)
        inputs = [
            torch.randn(1, count, tokens, width, device=options.device, requires_grad=True)
            for count in shapes
        ]

        def once(inputs: list = inputs, segments: Segments = segments) -> None:
            out, _ = segment_attention(torch.nn.Identity(), *inputs, None, segments=segments)
            out.backward(torch.ones_like(out))

        seconds, peak = _timed(once, options.device)
        found[f"float32, rows of {length}: ms"] = 1e3 * seconds
        found[f"float32, rows of {length}: peak GiB"] = peak / 2**30
    return found


def _head(options: argparse.Namespace) -> dict[str, float]:
    """The log-probs of a pass's tokens in bfloat16: milliseconds and peak GiB."""
    import torch

    from asyncrl.algorithms import chunk_elements, token_logprobs

    width, vocabulary = MODELS[options.model][0], MODELS[options.model][6]
    tokens = options.rows_per_pass * options.length
    torch.manual_seed(SEED)
    made = {"device": options.device, "dtype": torch.bfloat16, "requires_grad": True}
    hidden = torch.randn(tokens, width, **made)
    weight = torch.randn(vocabulary, width, **made)
    with torch.no_grad():
        weight *= width**-0.5
    targets = torch.randint(0, vocabulary, (tokens,), device=options.device)
    found: dict[str, float] = {}
    gradients: dict[str, torch.Tensor] = {}
    sizes = {
        "chunks of 224 MiB": chunk_elements(224 << 20),
        "chunks of 1 GiB": chunk_elements(1 << 30),
        "chunks of 4 GiB": chunk_elements(4 << 30),
        "whole logits": tokens * vocabulary,
    }
    for name, chunk in sizes.items():

        def once(chunk: int = chunk) -> None:
            hidden.grad = weight.grad = None
            logprobs, _ = token_logprobs(hidden, weight, targets, 1.0, chunk_elements=chunk)
            logprobs.mean().backward()

        def forward(chunk: int = chunk) -> None:
            with torch.no_grad():
                token_logprobs(hidden, weight, targets, 1.0, chunk_elements=chunk)

        try:
            found[f"{name}: forward ms"] = 1e3 * _timed(forward, options.device)[0]
            seconds, peak = _timed(once, options.device)
        except torch.OutOfMemoryError:
            continue
        found[f"{name}: forward and backward ms"] = 1e3 * seconds
        found[f"{name}: peak GiB"] = peak / 2**30
        assert hidden.grad is not None and weight.grad is not None
        gradients[name] = torch.cat([hidden.grad.flatten(), weight.grad.flatten()]).float().cpu()
    if "whole logits" in gradients:
        whole = gradients["whole logits"]
        for name, gradient in gradients.items():
            found[f"{name}: gradient from whole"] = float((gradient - whole).norm() / whole.norm())
    return found


def _timed(once, device: str) -> tuple[float, int]:
    """Seconds of the fastest of 5 calls after a warm-up, and the bytes that a call adds at its
    peak."""
    once()
    _wait(device)
    before = _allocated(device)
    _reset_peak(device)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        once()
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds), _peak(device) - before


def _step(options: argparse.Namespace, variant: str, path: str) -> dict[str, float]:
    """One variant's fastest step."""
    kind, _, checkpointed = variant.partition("/")
    rows = _rows(options)
    made = {"plain": _plain, "packed": _packed, "learner": _learner}[kind]
    step, more = made(options, path, bool(checkpointed))
    step(rows)
    _wait(options.device)
    _reset_peak(options.device)
    seconds, loss = [], 0.0
    for _ in range(STEPS):
        began = time.perf_counter()
        loss = step(rows)
        _wait(options.device)
        seconds.append(time.perf_counter() - began)
    peak = _peak(options.device)
    trained = sum(len(following) for _, following in rows)
    inputs = options.rows * options.length
    return {
        "tokens_per_s": inputs / min(seconds),
        "trained_per_s": trained / min(seconds),
        "step_s": min(seconds),
        "slowest_s": max(seconds),
        "loss": loss,
        "peak": float(peak),
        "flops_per_token": _flops_per_token(options),
        "rows_per_pass": float(options.rows_per_pass),
        **more(),
    }


def _plain(options: argparse.Namespace, path: str, checkpointed: bool):
    """transformers and torch alone: no padding, no mask, full logits, bfloat16 weights."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(options.device)
    model.train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = _adamw(model)
    used = {"rows_per_pass": float(options.rows_per_pass)}

    def passes(rows: list, each: int) -> float:
        targets, total = sum(len(following) for _, following in rows), None
        for at in range(0, len(rows), each):
            chosen = rows[at : at + each]
            ids = torch.tensor([[*prompt, *following] for prompt, following in chosen])
            ids = ids.to(options.device)
            labels = ids[:, 1:].clone()
            labels[:, : PROMPT - 1] = -100
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="sum"
            )
            loss = loss / targets
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
            del logits, loss
        return float(total)

    def step(rows: list) -> float:
        try:
            total = passes(rows, int(used["rows_per_pass"]))
        except torch.OutOfMemoryError:
            if used["rows_per_pass"] < 2:
                raise
            optimizer.zero_grad()
            torch.cuda.empty_cache()
            used["rows_per_pass"] //= 2
            return step(rows)
        _apply(model, optimizer)
        return total

    return step, lambda: used


def _packed(options: argparse.Namespace, path: str, checkpointed: bool):
    """asyncrl's policy and packing in a plain loop."""
    import torch

    from asyncrl.algorithms import supervised_loss, token_weights
    from asyncrl.config import LearnerConfig
    from asyncrl.models import (
        checkpoint_activations,
        head_settings,
        load_policy,
        micro_batch,
        token_example,
    )
    from asyncrl.packing import pack

    head = head_settings(LearnerConfig(device=options.device))
    policy = load_policy(path, torch.bfloat16, 1.0, head=head).to(options.device)
    if checkpointed:
        checkpoint_activations(policy)
    optimizer = _adamw(policy)

    def step(rows: list) -> float:
        examples = [token_example(row) for row in rows]
        weights = token_weights([example.loss_tokens for example in examples], "token_mean", 1)
        total = None
        for indices in pack(
            [len(example.tokens) for example in examples], _cap(options)
        ).micro_batches[0]:
            batch = micro_batch(examples, indices, options.device, weights)
            loss, _ = supervised_loss(policy(batch)[0], batch.weights)
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        _apply(policy, optimizer)
        return float(total)

    return step, dict


_PUBLISHED = {
    "version_bytes",
    "gather_s",
    "gather_and_checksum_s",
    "states",
    "turn_leave_s",
    "turn_take_s",
    "turn_freed",
    "turn_changed_nats",
}


def _learner(options: argparse.Namespace, path: str, checkpointed: bool):
    """The learner's rank; afterwards a gathered version, and a turn off the GPU and back."""
    rank = _start_rank(options, path, checkpointed)

    def supervised(rows: list) -> float:
        return rank.supervised_step(_token_table(rows))["loss"]

    def more() -> dict[str, float]:
        return {} if checkpointed else _published(rank, options)

    return supervised, more


def _start_rank(options: argparse.Namespace, path: str, checkpointed: bool):
    from asyncrl.learning import Meeting, start_rank
    from asyncrl.preflight import learner_spec

    spec = learner_spec(_config(options, path, checkpointed))
    return start_rank(0, spec, "bench", 0, Meeting.at("127.0.0.1"), "127.0.0.1")[0]


def _config(options: argparse.Namespace, path: str, checkpointed: bool):
    from asyncrl.config import Config

    tree = {
        "name": "bench",
        "max_steps": 1000,
        "model": {"path": path, "dtype": "bfloat16"},
        "data": {"train": "none", "max_prompt_length": PROMPT},
        "rollout": {"max_completion_length": options.length + 1 - PROMPT},
        "reward": {"functions": {"none": {"function": "none:none"}}},
        "learner": {
            "device": options.device,
            "bf16": True,
            "gradient_checkpointing": checkpointed,
            "learning_rate": 1e-9,
            "max_tokens_per_gpu": _cap(options),
        },
    }
    return Config.model_validate(tree)


def _published(rank, options: argparse.Namespace) -> dict[str, float]:
    """Seconds and bytes of a gathered version, and of a turn."""
    import torch

    from asyncrl.learning import DeviceTurns
    from asyncrl.weights import bucket_checksum, gather_buckets, weight_layout

    state = rank.state
    states = _allocated(options.device)
    entries, sizes = weight_layout(state.table, "bfloat16", state.spec.bucket_bytes)

    def gather(checked: bool) -> float:
        def sink(number: int, content: np.ndarray) -> None:
            if checked:
                bucket_checksum(content.data)

        began = time.perf_counter()
        gather_buckets(state.parameters, state.table, entries, sizes, 0, sink)
        return time.perf_counter() - began

    gather(False)
    row = _row(np.random.default_rng(SEED), options.length, MODELS[options.model][6])
    before = rank.logprobs([row])[0]
    turns = DeviceTurns(state.engine, options.device, 1.0, 0.1)
    seconds = []
    free = _allocated(options.device)
    for _ in range(2):  # the first one allocates the memory of the host
        began = time.perf_counter()
        turns.leave()
        left, freed = time.perf_counter(), free - _allocated(options.device)
        turns.take()
        _wait(options.device)
        seconds.append((left - began, time.perf_counter() - left))
    after = rank.logprobs([row])[0]
    found = {
        "version_bytes": float(sum(sizes)),
        "gather_s": min(gather(False) for _ in range(2)),
        "gather_and_checksum_s": min(gather(True) for _ in range(2)),
        "states": float(states),
        "turn_leave_s": seconds[-1][0],
        "turn_take_s": seconds[-1][1],
        "turn_freed": float(freed),
        "turn_changed_nats": float(np.abs(after - before).max()),
    }
    assert torch.isfinite(torch.tensor(list(found.values()))).all()
    return found


def _memory(options: argparse.Namespace, path: str) -> dict[str, float]:
    """What a rank with checkpointing allocates, in bytes."""
    rows = _rows(options)[: 2 * options.rows_per_pass]
    rank = _start_rank(options, path, True)
    rank.supervised_step(_token_table(rows))
    _wait(options.device)
    _reset_peak(options.device)
    rank.supervised_step(_token_table(rows))
    _wait(options.device)
    return {
        "states": float(_allocated(options.device)),
        "peak": float(_peak(options.device)),
    }


def _plan(options: argparse.Namespace, path: str) -> dict[str, float]:
    """The estimate of `asyncrl plan` for that rank, in bytes. It makes DeepSpeed choose the CPU, so
    it needs a process of its own."""
    from asyncrl.preflight import estimate

    needs = estimate(_config(options, path, True))
    return {
        "plan_states": float(needs.on_device),
        "plan_total": float(needs.on_device + needs.logits),
    }


def _rows(options: argparse.Namespace) -> list:
    """(prompt ids, following ids) of each row."""
    generator = np.random.default_rng(SEED)
    vocabulary = MODELS[options.model][6]
    return [_row(generator, options.length + 1, vocabulary) for _ in range(options.rows)]


def _row(generator: np.random.Generator, length: int, vocabulary: int) -> tuple[list, list]:
    row = generator.integers(0, vocabulary, length).tolist()
    return row[:PROMPT], row[PROMPT:]


def _cap(options: argparse.Namespace) -> int:
    return options.rows_per_pass * (options.length + 1)


def _token_table(rows: list) -> pa.Table:
    masks = [[False] * len(prompt) + [True] * len(target) for prompt, target in rows]
    return pa.table(
        {
            "input_ids": pa.array([[*prompt, *target] for prompt, target in rows], IDS),
            "loss_mask": pa.array(masks, MASK),
        }
    )


def _flops_per_token(options: argparse.Namespace) -> float:
    """Forward and backward FLOP of a token: 6 for each weight of a matrix, and causal attention."""
    hidden, mlp, layers, heads, kv_heads, width, vocabulary = MODELS[options.model]
    weights = layers * (2 * hidden * width * (heads + kv_heads) + 3 * hidden * mlp)
    attended = options.length / 2
    return 6 * (weights + hidden * vocabulary) + 12 * layers * heads * width * attended


def _model(name: str, folder: str, **changes: float) -> str:
    """Save a seeded random Qwen3 in bfloat16, and return its path."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    path = Path(folder) / name
    if path.exists():
        return str(path)
    hidden, mlp, layers, heads, kv_heads, width, vocabulary = MODELS[name]
    config = Qwen3Config(
        **{
            "hidden_size": hidden,
            "intermediate_size": mlp,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": width,
            "vocab_size": vocabulary,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        }
        | changes
    )
    torch.manual_seed(SEED)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.cpu().save_pretrained(path)
    return str(path)


def _adamw(model):
    import torch

    return torch.optim.AdamW(
        model.parameters(), lr=1e-9, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )


def _apply(model, optimizer) -> None:
    import torch

    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _machine(device: str) -> str:
    import torch
    import transformers

    card = torch.cuda.get_device_name() if device == "cuda" else "no GPU"
    return f"{card}; torch {torch.__version__}, transformers {transformers.__version__}"


def _is_gpu(options: argparse.Namespace) -> bool:
    return options.device == "cuda"


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def _allocated(device: str) -> int:
    import torch

    return torch.cuda.memory_allocated() if device == "cuda" else 0


def _peak(device: str) -> int:
    import torch

    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def _reset_peak(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


PARTS = {
    "model": lambda options, name, folder: {"path": _model(name, folder)},
    "isolation": _isolation,
    "attention": _attention,
    "head": _head,
    "step": _step,
    "memory": _memory,
    "plan": _plan,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
