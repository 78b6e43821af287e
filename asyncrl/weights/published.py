"""The table of a version: each tensor of the checkpoint, and which elements of the learner's
parameters it consists of.

Only this module uses transformers' internal conversions (`core_model_loading`). When transformers
loads a checkpoint, it renames parameters and merges several into one, such as a mixture's experts.
`revert_weight_conversion` is the inverse, on whole tensors. Here it gets `Selection`s, which have
no data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

from asyncrl.models.unused import unused
from asyncrl.weights.layout import ITEM_BYTES
from asyncrl.weights.pieces import NotExpressibleError, Piece, Selection
from asyncrl.weights.stored import StoredTensor, same_values, stored_tensors

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

TRAINED_TYPES = ("float32", "float16", "bfloat16", "float64")
"""Dtypes of a checkpoint's tensors that can be trained."""


class CannotPublishError(ValueError):
    """The checkpoint's tensors cannot be made from the learner's parameters."""


class LoadingInfo(TypedDict):
    """The fields of transformers' loading report that this module reads."""

    missing_keys: set[str]
    mismatched_keys: set[tuple[str, torch.Size, torch.Size]]
    """Name, shape in the checkpoint, shape in the model."""


@dataclass(frozen=True, slots=True)
class PublishedTensor:
    """A tensor of the checkpoint. With pieces, it comes from the learner's parameters. Without any,
    it is published as stored in the file."""

    name: str
    stored: StoredTensor
    pieces: tuple[Piece, ...] = ()

    def dtype(self, of_parameters: str) -> str:
        """The dtype of the published tensor, given the dtype of published parameters."""
        return of_parameters if self.pieces else self.stored.dtype


@dataclass(frozen=True, slots=True)
class VersionTable:
    """All tensors of a version in the order of its buckets, and the names that it leaves out."""

    tensors: tuple[PublishedTensor, ...]
    left_out: tuple[str, ...]
    parameters: Mapping[str, tuple[int, ...]]
    """Shape of each of the learner's parameters, by its name in transformers. Tied parameters are
    listed once, under the first name."""
    architecture: str
    """Name of the model's class in transformers."""


def version_table(model_path: str | Path) -> VersionTable:
    """Make the table of a checkpoint. No tensor is read, except those that the config ties and the
    files hold apart.

    Raises:
        CannotPublishError: the checkpoint cannot be trained and published.
        CheckpointFilesError: its files cannot be read.
    """
    stored = stored_tensors(model_path)
    config, model_class = _causal_lm(model_path)
    model, missing = _empty_model(config, model_class, stored)
    selections, buffers = _selections(model)
    try:
        reverted = _revert(model, selections)
    except NotExpressibleError as error:
        raise CannotPublishError(
            f"{type(model).__name__}: transformers {error} to write this model's weights back,"
            " which cannot be done from shards"
        ) from error
    first_of = _first_names(model, selections)
    found: dict[str, tuple[Piece, ...]] = {}
    for name, selection in reverted.items():
        if (at := _stored_name(name, stored, model.base_model_prefix)) is not None:
            found[at] = _fitting(at, selection, stored[at])
    _check_covered(selections, found, reverted, first_of, missing, type(model).__name__)
    renamed = {
        name: tuple(_renamed(piece, first_of) for piece in pieces)
        for name, pieces in found.items()
        if not any(piece.parameter in buffers for piece in pieces)
    }
    _refuse_apart(renamed, stored)
    rest = sorted(set(stored) - set(found), key=_natural)
    shapes_of_rest = {name: stored[name].shape for name in rest}
    ignored = unused(shapes_of_rest, type(model))
    dropped = unused(shapes_of_rest, _whole_class(config, model))
    # vLLM reloads a module as a whole: if one of its tensors is published, all must be.
    modules = {name.rpartition(".")[0] for name in found}
    left_out = [name for name in rest if name in dropped and name.rpartition(".")[0] not in modules]
    if whole := next(
        (name for name in sorted(found) if stored[name].dtype not in TRAINED_TYPES), None
    ):
        raise CannotPublishError(
            f"{whole!r} of the checkpoint has type {stored[whole].dtype}: it is quantized, and"
            " cannot be trained"
        )
    if unknown := next(
        (name for name in rest if name not in left_out and stored[name].dtype not in ITEM_BYTES),
        None,
    ):
        raise CannotPublishError(
            f"{unknown!r} of the checkpoint has type {stored[unknown].dtype}: it is quantized, and"
            " cannot be trained"
        )
    _refuse_untaken([name for name in rest if name not in ignored], found, config, model)
    tensors = [
        PublishedTensor(name, stored[name], renamed.get(name, ()))
        for name in stored
        if name not in left_out
    ]
    # Order by layer: vLLM completes each layer as soon as all of its tensors have arrived.
    tensors.sort(key=lambda tensor: _natural(tensor.name))
    shapes = {
        name: selections[name].shape
        for name in dict.fromkeys(first_of.values())
        if name not in buffers
    }
    return VersionTable(tuple(tensors), tuple(left_out), shapes, type(model).__name__)


def whole_table(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> VersionTable:
    """The table of tensors that are the learner's parameters of the same names, such as an
    adapter's."""
    tensors = []
    for name, shape in shapes.items():
        count = math.prod(shape)
        piece = Piece(name, (count,), 0, (1,), 0, (1,))
        tensors.append(PublishedTensor(name, StoredTensor(Path(), shape, dtype), (piece,)))
    return VersionTable(tuple(tensors), (), dict(shapes), "")


def _empty_model(
    config: PreTrainedConfig,
    model_class: type[PreTrainedModel],
    stored: Mapping[str, StoredTensor],
) -> tuple[PreTrainedModel, set[str]]:
    """Load the checkpoint with tensors on the meta device, which have shapes and no data. Returns
    the model, and the names of parameters and buffers that the checkpoint lacks. The model records
    the conversions that the checkpoint's names needed."""
    import torch
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.utils import logging

    if is_deepspeed_zero3_enabled():
        raise RuntimeError(
            "make a version's table before an HfDeepSpeedConfig: while one exists, transformers"
            " shards every model"
        )
    if model_class.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()  # as AutoModelForCausalLM does
    empty = {name: torch.empty(tensor.shape, device="meta") for name, tensor in stored.items()}
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        loaded = model_class.from_pretrained(
            None,
            config=config,
            state_dict=empty,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (ValueError, RuntimeError) as error:
        raise CannotPublishError(
            f"transformers cannot make the parameters of {model_class.__name__} from the"
            " checkpoint's tensors: some are missing or have other shapes; load it with"
            " transformers, whose report names them"
        ) from error
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
    # The annotation in transformers ignores `output_loading_info`.
    model, loading = cast("tuple[PreTrainedModel, LoadingInfo]", loaded)
    _refuse_other_shapes(model_class.__name__, loading["mismatched_keys"])
    return model, set(loading["missing_keys"])


def _causal_lm(model_path: str | Path) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """The checkpoint's configuration, and its causal language model class in transformers."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    except Exception as error:  # a value of the wrong type may raise any class of error
        raise CannotPublishError(
            f"transformers cannot read its config.json ({_first_line(error)}); repair it"
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        raise CannotPublishError(
            "config.json has a quantization_config: quantized weights cannot be trained; name the"
            " checkpoint without it"
        )
    try:
        mapped = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise CannotPublishError(
            f"transformers has no causal language model for model_type {config.model_type!r}"
        ) from None
    classes = [
        model_class
        for model_class in (mapped if isinstance(mapped, (tuple, list)) else (mapped,))
        if model_class is not None
    ]
    named = [
        model_class
        for model_class in classes
        if model_class.__name__ in (config.architectures or ())
    ]
    return config, (named or classes)[0]


def _whole_class(config: PreTrainedConfig, model: PreTrainedModel) -> type[PreTrainedModel]:
    """The class of all of the checkpoint, of which the model may be a part, such as its text model:
    that part ignores the others."""
    import transformers

    own: type[PreTrainedModel] = type(model)
    if type(model.config) is type(config):
        return own
    return getattr(transformers, next(iter(config.architectures or ()), ""), own)


def _refuse_other_shapes(
    model_class: str, mismatched: Iterable[tuple[str, torch.Size, torch.Size]]
) -> None:
    """Raise CannotPublishError for the first mismatched tensor (name, shape in the checkpoint,
    shape in the model)."""
    for name, stored, wanted in sorted(mismatched):
        if len(stored) == len(wanted) == 3 and stored[1:] == wanted[1:]:  # merged experts
            raise CannotPublishError(
                f"the checkpoint has tensors of {stored[0]} experts for {name!r}, and"
                f" {model_class} has {wanted[0]}; complete it"
            )
        raise CannotPublishError(
            f"{name!r} has shape {tuple(stored)} in the checkpoint, and {tuple(wanted)} in"
            f" {model_class}; save it with its own config"
        )


def _revert(model: PreTrainedModel, selections: Mapping[str, Selection]) -> dict[str, Selection]:
    from transformers.core_model_loading import revert_weight_conversion

    # A `Selection` supports all tensor operations of the conversions.
    given = cast("dict[str, torch.Tensor]", dict(selections))
    reverted: dict[str, Selection] = revert_weight_conversion(model, given)
    return reverted


def _selections(model: PreTrainedModel) -> tuple[dict[str, Selection], set[str]]:
    """A selection of every parameter, under each of its names, and of every buffer that is saved.
    Also the names of these buffers."""
    saved = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **buffers}
    return {name: Selection.of(name, tensor.shape) for name, tensor in tensors.items()}, {*buffers}


def _first_names(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Name of a tensor → the name under which the model lists it. Tied parameters share the first
    of their names."""
    tied: dict[str, str] = dict(model.all_tied_weights_keys)
    firsts: dict[str, str] = {}
    found: dict[str, str] = {}
    for name in names:
        found[name] = firsts.setdefault(tied.get(name, name), name)
    return found


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def _stored_name(name: str, stored: Mapping[str, StoredTensor], prefix: str) -> str | None:
    """The name in the file: as transformers would write it, or without or with the prefix of the
    base model."""
    return next(
        (
            candidate
            for candidate in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
            if candidate in stored
        ),
        None,
    )


def _fitting(name: str, selection: Selection, stored: StoredTensor) -> tuple[Piece, ...]:
    """The pieces of the tensor in the file's shape. Dimensions of size 1 may differ: transformers
    drops them when it splits experts."""
    if [size for size in selection.shape if size != 1] != [
        size for size in stored.shape if size != 1
    ]:
        raise CannotPublishError(
            f"{name!r} has shape {stored.shape} in the checkpoint, but {selection.shape} when made"
            " from the model's parameters"
        )
    return selection.pieces()


def _check_covered(
    selections: Mapping[str, Selection],
    found: Mapping[str, Iterable[Piece]],
    reverted: Mapping[str, Selection],
    first_of: Mapping[str, str],
    missing: set[str],
    model: str,
) -> None:
    """Raise CannotPublishError unless the checkpoint's tensors cover every parameter and buffer
    completely, under one of its names."""
    covered = dict.fromkeys(selections, 0)
    for pieces in found.values():
        for piece in pieces:
            covered[piece.parameter] += piece.elements
    whole = {
        first_of[name] for name, elements in covered.items() if elements == selections[name].numel()
    }
    lost = next((name for name in selections if first_of[name] not in whole), None)
    if lost is None:
        return
    if lost in missing:
        raise CannotPublishError(
            f"the checkpoint lacks {lost!r} of {model}, which would start from new values;"
            " complete it"
        )
    wanted = next(
        (
            name
            for name, selection in reverted.items()
            if any(piece.parameter == lost for piece in selection.pieces())
        ),
        None,
    )
    raise CannotPublishError(
        f"{lost!r} of {model} is not among the checkpoint's tensors (transformers would write"
        f" {wanted!r}); save it with transformers"
    )


def _refuse_apart(
    made: Mapping[str, tuple[Piece, ...]], stored: Mapping[str, StoredTensor]
) -> None:
    """Raise CannotPublishError if two tensors that the model ties have other values in the files.

    transformers compares such tensors and leaves them untied. Under ZeRO-3 it compares empty
    shards, and ties them. vLLM ties them without looking.
    """
    first: dict[tuple[Piece, ...], str] = {}
    for name, pieces in made.items():
        other = first.setdefault(pieces, name)
        if other != name and not same_values(stored, other, name):
            raise CannotPublishError(
                f"config.json ties {name!r} to {other!r}, and the files hold other values for the"
                " two, so one of them would be lost; set tie_word_embeddings: false in config.json"
                " to keep both, or remove the one that should not count from the files"
            )


def _renamed(piece: Piece, first_of: Mapping[str, str]) -> Piece:
    return Piece(
        first_of[piece.parameter],
        piece.shape,
        piece.start,
        piece.strides,
        piece.to,
        piece.to_strides,
    )


def _refuse_untaken(
    names: Iterable[str], found: Iterable[str], config: PreTrainedConfig, model: PreTrainedModel
) -> None:
    """Raise CannotPublishError for the first tensor that no parameter or buffer takes. If the model
    is a part of the checkpoint, such as its text model, the other parts stay as stored."""
    if type(model.config) is not type(config):
        own = {name.partition(".")[0] for name in found}
        names = [name for name in names if name.partition(".")[0] in own]
    for name in names:
        raise CannotPublishError(
            f"the checkpoint's tensor {name!r} has no parameter in {type(model).__name__} of its"
            " config.json, so another model than the checkpoint's would be trained; restore the"
            " config.json that belongs to it, merge an adapter, or remove the tensor"
        )


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key of a name that puts layer 2 before layer 10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]
