"""Fingerprints of published tensors and of an engine's tensors, without an engine: fused, padded,
packed in a kernel, in bfloat16."""

import numpy as np
import pytest
import torch

from asyncrl.contracts.messages import Manifest
from asyncrl.weights.engine_fingerprints import loaded_shards
from asyncrl.weights.fingerprint import (
    difference_text,
    fingerprint,
    joined_fingerprints,
    published_fingerprints,
    row_products,
    signs,
)
from asyncrl.weights.layout import plan_buckets


def test_a_hand_computed_fingerprint():
    assert list(signs(8)) == list(signs(100)[:8]) and set(signs(64)) == {1.0, -1.0}
    one, other, *_ = signs(3)
    matrix = np.array([[1.0, 2.0], [3.0, -4.0], [0.0, 0.0]], dtype=np.float32)
    products = row_products(matrix)
    assert list(products) == [one + 2 * other, 3 * one - 4 * other, 0.0]
    assert (
        fingerprint(products)
        == fingerprint(products[:2])
        == (one * products[0] + other * products[1], abs(products[0]) + abs(products[1]))
    )
    assert list(row_products(np.array([1.0, -2.0]))) == [1.0, -2.0]


def test_chunks_do_not_change_the_products(monkeypatch):
    matrix = np.random.default_rng(0).normal(size=(37, 5))
    whole = row_products(matrix)
    monkeypatch.setattr("asyncrl.weights.fingerprint.CHUNK_ELEMENTS", 12)
    assert np.allclose(row_products(matrix), whole, rtol=1e-12)


class Packed:
    """The quant method of a linear layer on CPU, whose weight is only in the kernel."""

    def apply(self, layer, x, bias=None):
        return layer.cpu_linear(x)


class Linear(torch.nn.Module):
    def __init__(self, weight, sizes=None, keep=False):
        super().__init__()
        self.weight = torch.nn.Parameter(
            weight if keep else torch.empty(0, dtype=weight.dtype), requires_grad=False
        )
        packed = weight.clone()
        self.cpu_linear = lambda x: x @ packed.T
        self.quant_method, self.input_size = Packed(), weight.shape[1]
        if sizes:
            self.output_sizes = sizes


class Head(Linear):
    def __init__(self, weight):
        super().__init__(weight, keep=True)


def held_fingerprints(*workers):
    return joined_fingerprints([loaded_shards(model, Head) for model in workers], len(workers))


@pytest.fixture
def published():
    torch.manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (11, 8),
        "model.norm.weight": (8,),
        "model.attn.o_proj.weight": (8, 8),
    }
    shapes |= {
        f"model.attn.{name}_proj.weight": (rows, 8) for name, rows in (("q", 8), ("k", 4), ("v", 4))
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def engine_of(tensors):
    """A model in vLLM's form: q, k and v fused, the vocabulary padded, a tied head with a packed
    copy."""
    model = torch.nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    inner, attention = torch.nn.Module(), torch.nn.Module()
    model.model, inner.attn = inner, attention
    attention.qkv_proj = Linear(
        torch.cat([tensors[f"model.attn.{name}_proj.weight"] for name in "qkv"]), [8, 4, 4]
    )
    attention.o_proj = Linear(tensors["model.attn.o_proj.weight"])
    inner.norm = torch.nn.LayerNorm(8, bias=False)
    inner.norm.weight = torch.nn.Parameter(tensors["model.norm.weight"])
    embedding = torch.cat([tensors["model.embed_tokens.weight"], torch.zeros(5, 8)])
    inner.embed_tokens = torch.nn.Embedding(16, 8)
    inner.embed_tokens.weight = torch.nn.Parameter(embedding)
    model.lm_head = Head(embedding)
    return model


def publish(tensors, dtype="float32"):
    entries, sizes = plan_buckets(
        [(name, tuple(tensor.shape), dtype) for name, tensor in tensors.items()], 256
    )
    buckets = [np.zeros(size, dtype=np.uint8) for size in sizes]
    for entry in entries:
        data = (
            tensors[entry.name]
            .to(getattr(torch, dtype))
            .contiguous()
            .view(torch.uint8)
            .numpy()
            .reshape(-1)
        )
        buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes] = data
    return published_fingerprints(
        Manifest("run", 1, 0, entries, tuple(buckets), sizes, (0,) * len(sizes)), buckets
    )


def test_equal_weights_have_equal_fingerprints(published):
    held = held_fingerprints(engine_of(published))
    assert set(held) == {*published, "lm_head.weight"}
    text = difference_text(publish(published), {"a": held}, "float32")
    assert (
        text == "all 7 tensors that could be compared by name are the same on both sides (6 were"
        " published)"
    )


@pytest.mark.parametrize(
    "name",
    [
        "model.attn.k_proj.weight",
        "model.attn.o_proj.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
    ],
)
def test_the_tensor_that_differs_is_named(published, name):
    wrong = {**published, name: published[name].flip(0)}
    held = {
        "right": held_fingerprints(engine_of(published)),
        "wrong": held_fingerprints(engine_of(wrong)),
    }
    text = difference_text(publish(published), held, "float32")
    assert f"most of all '{name}' on replica wrong: published sum " in text or (
        name.startswith("model.embed") and "'lm_head.weight'" in text
    )


def test_a_tied_head_with_a_stale_packed_copy_is_named(published):
    model = engine_of(published)
    stale = torch.randn(16, 8)
    model.lm_head.cpu_linear = lambda x: x @ stale.T
    text = difference_text(publish(published), {"a": held_fingerprints(model)}, "float32")
    assert text.startswith(
        "of 7 tensors compared 1 differ, most of all 'lm_head.weight' on replica a: published sum "
    )


def test_bfloat16_rounding_is_tolerated_and_nan_is_not(published):
    rounded = {name: tensor.bfloat16() for name, tensor in published.items()}
    held = held_fingerprints(engine_of({name: tensor.float() for name, tensor in rounded.items()}))
    ours = publish(published, "bfloat16")
    assert difference_text(ours, {"a": held}, "bfloat16").startswith("all 7")
    held["model.norm.weight"] = (float("nan"), float("nan"))
    assert "most of all 'model.norm.weight'" in difference_text(ours, {"a": held}, "bfloat16")
    assert (
        difference_text(ours, {"a": {"other": (1.0, 1.0)}}, "bfloat16")
        == "no tensor could be compared by name"
    )


@pytest.mark.parametrize(
    "wrong", ["model.language_model.attn.k_proj.weight", "model.language_model.embed_tokens.weight"]
)
def test_a_model_with_vision_is_compared_under_the_checkpoints_names(published, wrong):
    """vLLM renames the prefixes of a vision model's parts."""
    from vllm.model_executor.models.utils import WeightsMapper

    model = torch.nn.Module()
    model.language_model = engine_of(published)
    model.packed_modules_mapping = model.language_model.packed_modules_mapping
    model.hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "model.language_model.": "language_model.model.",
            "lm_head.": "language_model.lm_head.",
            "model.audio.": None,
        }
    )
    theirs = {
        name.replace("model.", "model.language_model."): tensor
        for name, tensor in published.items()
    }
    held = {"a": held_fingerprints(model)}
    assert difference_text(publish(theirs), held, "float32").startswith(
        "all 8 tensors that could be compared by name are the same"
    )
    text = difference_text(publish({**theirs, wrong: theirs[wrong].flip(0)}), held, "float32")
    assert (
        f"most of all '{wrong}' on replica a: published sum " in text or "lm_head.weight'" in text
    )


def workers_of(tensors, count):
    """`count` workers that hold the shards of `engine_of(tensors)`, as vLLM splits them."""
    workers = []
    for rank in range(count):
        model = engine_of(tensors)
        attention, inner = model.model.attn, model.model
        query, key, value = (tensors[f"model.attn.{name}_proj.weight"] for name in "qkv")
        heads = min(count, 2)  # k and v have two heads, of two rows each
        of_head = rank * heads // count
        parts = [query.chunk(count)[rank], *(t.chunk(heads)[of_head] for t in (key, value))]
        sizes = [len(part) * count for part in parts]
        attention.qkv_proj = Linear(torch.cat(parts), sizes)
        attention.qkv_proj.output_size_per_partition = sum(sizes) // count
        attention.qkv_proj.output_size = sum(sizes)
        attention.qkv_proj.num_kv_head_replicas = count // heads
        attention.o_proj = Linear(tensors["model.attn.o_proj.weight"].chunk(count, dim=1)[rank])
        attention.o_proj.input_size_per_partition = 8 // count
        attention.o_proj.input_size = 8
        embedding = inner.embed_tokens.weight.detach().chunk(count)[rank]
        inner.embed_tokens.weight = torch.nn.Parameter(embedding)
        model.lm_head = Head(embedding)
        for table in (inner.embed_tokens, model.lm_head):
            table.num_embeddings_padded, table.output_size_per_partition = 16, 16 // count
        for module in (attention.qkv_proj, attention.o_proj, inner.embed_tokens, model.lm_head):
            module.tp_size, module.tp_rank = count, rank
        workers.append(model)
    return workers


@pytest.mark.parametrize("count", [2, 4])
def test_workers_that_hold_shards_have_the_fingerprints_of_the_whole(published, count):
    whole, split = (
        held_fingerprints(engine_of(published)),
        held_fingerprints(*workers_of(published, count)),
    )
    assert set(split) == set(whole)
    for name, expected in whole.items():
        assert split[name] == pytest.approx(expected, rel=1e-5, abs=1e-5), name
    for name in published:
        wrong = {**published, name: published[name].flip(0)}
        text = difference_text(
            publish(published), {"a": held_fingerprints(*workers_of(wrong, count))}, "float32"
        )
        assert f"most of all '{name}'" in text or "'lm_head.weight'" in text
    # Only one worker has the old weights.
    old = {name: tensor.flip(-1) for name, tensor in published.items()}
    mixed = [workers_of(old, count)[0], *workers_of(published, count)[1:]]
    text = difference_text(publish(published), {"a": held_fingerprints(*mixed)}, "float32")
    assert " differ, most of all " in text


@pytest.mark.parametrize("count", [2, 4])
def test_a_tensor_that_the_checkpoint_fuses_is_joined_part_by_part(published, count):
    parts = [f"model.attn.{name}_proj.weight" for name in "qkv"]
    fused = {name: tensor for name, tensor in published.items() if name not in parts}
    fused["model.attn.qkv_proj.weight"] = torch.cat([published[name] for name in parts])
    workers = workers_of(published, count)
    for model in workers:
        model.packed_modules_mapping = {"qkv_proj": ["qkv_proj"]}
    held = {"a": held_fingerprints(*workers)}
    assert difference_text(publish(fused), held, "float32").startswith("all 5 tensors that")
    wrong = {**fused, "model.attn.qkv_proj.weight": fused["model.attn.qkv_proj.weight"].flip(0)}
    text = difference_text(publish(wrong), held, "float32")
    assert text.startswith("of 5 tensors compared 1 differ, most of all 'model.attn.qkv_proj.w")


def test_a_tensor_that_workers_hold_differently_in_an_unknown_way_is_not_compared(published):
    first, second = workers_of(published, 2)
    second.model.norm.weight = torch.nn.Parameter(published["model.norm.weight"] + 1)
    assert "model.norm.weight" not in held_fingerprints(first, second)


def test_parts_of_the_layers_are_put_together(published):
    """Two parts of a pipeline, with two workers each. Both have the tied embedding."""
    whole = held_fingerprints(engine_of(published))
    first, last = ([loaded_shards(model, Head) for model in workers_of(published, 2)] for _ in "12")
    for shards in first:
        del shards["model.norm.weight"], shards["lm_head.weight"]
    for shards in last:
        for name in [name for name in shards if ".attn." in name]:
            del shards[name]
    joined = joined_fingerprints([*first, *last], 2)
    assert set(joined) == set(whole)
    for name, expected in whole.items():
        assert joined[name] == pytest.approx(expected, rel=1e-5, abs=1e-5), name
    stale = [loaded_shards(model, Head) for model in workers_of(changed(published), 2)]
    held = {"a": joined_fingerprints([*first, *stale], 2)}
    text = difference_text(publish(published), held, "float32")
    assert "'model.embed_tokens.weight' on replica a" in text and "nan" in text


def changed(tensors):
    name = "model.embed_tokens.weight"
    return {**tensors, name: tensors[name].flip(0)}
