"""Direct copies into a vLLM model's parameters, without their weight loaders, take effect in every
form."""

import pytest
import torch
from test_reload import backend_around

from asyncrl.weights.apply import StagedUpdate


class Layer(torch.nn.Module):
    """A layer with its own parameters, such as experts or attention sinks."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.Parameter(torch.zeros(3, 4, 2), requires_grad=False)
        self.sinks = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self.loaded = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False)


def whole(layer, new):
    layer.experts.copy_(new["experts"])


def through_data(layer, new):
    layer.experts.data.copy_(new["experts"])


def slice_by_slice(layer, new):
    for expert in range(3):
        layer.experts.data[expert].copy_(new["experts"][expert])


def assigned(layer, new):
    layer.experts.data[:, :2] = new["experts"][:, :2]
    layer.experts.data[:, 2:] = new["experts"][:, 2:]


def transposed(layer, new):
    layer.experts.data.transpose(1, 2).copy_(new["experts"].transpose(1, 2).contiguous())


class Model(torch.nn.Module):
    def __init__(self, copies, through_the_loader: bool = True) -> None:
        super().__init__()
        self.layer, self.after = Layer(), torch.nn.Linear(2, 2, bias=False)
        self._copies, self._through_the_loader = copies, through_the_loader

    def load_weights(self, weights):
        new = dict(weights)
        self._copies(self.layer, new)
        self.layer.sinks.data.copy_(new["sinks"])
        for parameter, name in ((self.layer.loaded, "loaded"), (self.after.weight, "after")):
            if name == "after" or self._through_the_loader:
                parameter.weight_loader(parameter, new[name])


def tensors(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"experts": (3, 4, 2), "sinks": (4,), "loaded": (2, 2), "after": (2, 2)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def update(model: Model, new: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    made = backend_around(model)
    monkeypatch.setattr("asyncrl.weights.apply.map_tensors", lambda _: list(new.items()))
    made.start_weight_update()
    made.receive_weights(StagedUpdate("unused", 0))
    made.finish_weight_update()


@pytest.mark.parametrize("copies", [whole, through_data, slice_by_slice, assigned, transposed])
@pytest.mark.parametrize(
    "through_the_loader", [True, False], ids=["the rest by loaders", "no weights for the rest"]
)
def test_every_copy_reaches_the_parameters_memory(monkeypatch, copies, through_the_loader):
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model = Model(copies, through_the_loader)
    record_metadata_for_reloading(model)
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    for seed in (1, 2):
        new = tensors(seed)
        update(model, new, monkeypatch)
        held = {
            name.rpartition(".")[2].replace("weight", "after"): parameter
            for name, parameter in model.named_parameters()
        }
        for name, parameter in held.items():
            updated = name != "loaded" or through_the_loader
            assert torch.equal(parameter, new[name] if updated else torch.zeros(2, 2)), name
        assert {
            name: parameter.data_ptr() for name, parameter in model.named_parameters()
        } == places
