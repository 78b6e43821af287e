"""The adapters (LoRA, arXiv:2106.09685) of one engine. New requests use the newest adapter; a
request keeps the one that it started with. So versions are never mixed in a completion, and no
update pauses the engine.

At most `slots` adapters have requests at a time, which is vLLM's `max_loras`. A run's rollouts
never need more: at learner version v, its running groups began at versions v - S … v, with
S = staleness.max_staleness. Older ones have been trained or dropped before the learner reached v
(`asyncrl.control.staleness`; tests/control/test_coordinator_properties.py checks it). That makes
S + 1, and a run has S + 2 slots. Other requests may need more, such as those of an evaluation with
eval.in_flight, or of HTTP clients. Then requests with a further adapter wait here until all
requests of an older one have ended. vLLM would let them wait too, but it asserts that running
requests have at most `max_loras` adapters, and does not count those that pause for a step.

An adapter's directory stays until its last request has ended: vLLM drops the least recently used
adapter when it takes another one, and reads it again from its path when a request needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from asyncrl.weights.layout import ITEM_BYTES
from asyncrl.weights.manifest import ManifestError
from asyncrl.weights.staging import Staged, StagingError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

FILE_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""torch's name → name in a safetensors file."""


@dataclass(eq=False, slots=True)
class Adapter:
    """One version's adapter in the engine."""

    version: int
    request: LoRARequest
    """What vLLM's requests name: an id, a name and a directory that no other adapter has."""
    scale: float
    users: int = 0
    """Requests in progress."""

    @property
    def id(self) -> int:
        """vLLM's number of this adapter."""
        return self.request.lora_int_id


class Adapters:
    """Loads adapters into an engine, and removes those without requests."""

    def __init__(self, slots: int) -> None:
        """
        Args:
            slots: adapters that may have requests at a time.
        """
        self.slots = slots
        self.current: Adapter | None = None
        """The newest adapter; None = the base model answers."""
        self.live: list[Adapter] = []
        """Adapters whose directories exist: the current one, and those with requests. They are at
        most `slots` + 1, for which vLLM has memory. Loading never waits, so a replica takes a
        version at once."""
        self._freed = asyncio.Event()
        """Set, and replaced, when the last request of an adapter has ended."""
        self._ids = itertools.count(1)  # vLLM's ids start at 1
        self._removals: set[asyncio.Task[None]] = set()

    async def load(
        self,
        llm: AsyncLLM,
        folder: Path,
        staged: Staged,
        settings: Mapping[str, object],
        version: int,
    ) -> int:
        """Load an adapter and let new requests use it. Generation continues; vLLM loads the adapter
        between two steps. Returns the number of requests that continue with older adapters.

        Args:
            folder: parent of the adapters' directories.
            settings: the content of PEFT's adapter_config.json.

        Raises:
            ManifestError: vLLM refuses the adapter. The former one stays.
            StagingError: the adapter's files cannot be written. The former one stays.
            EngineDeadError: the engine has died. Every other error leaves as it is.
        """
        from vllm.lora.request import LoRARequest

        number = next(self._ids)
        # The cache of prefixes tells adapters apart by name and path. A number that rises with
        # every load makes both new, also when another run or attempt repeats a version.
        directory = folder / f"adapter-{number}"
        await asyncio.to_thread(write_adapter, directory, staged, settings)
        adapter = Adapter(
            version, LoRARequest(directory.name, number, str(directory)), adapter_scale(settings)
        )
        try:
            await llm.add_lora(adapter.request)
        except BaseException as error:
            shutil.rmtree(directory, ignore_errors=True)
            # vLLM's client raises what its process refuses as a plain Exception.
            if type(error) is not Exception:
                raise
            raise ManifestError(
                f"vLLM refuses the adapter of version {version}: {' '.join(str(error).split())}"
            ) from error
        former, self.current = self.current, adapter
        self.live.append(adapter)
        if former is not None:
            self._remove_unused(llm, former)
        return sum(older.users for older in self.live)

    async def wait_for_slot(self) -> None:
        """Wait until a request with the current adapter may begin. Call `using` before the next
        await."""
        while (adapter := self.current) is not None and not adapter.users:
            if sum(older.users > 0 for older in self.live) < self.slots:
                return
            await self._freed.wait()

    @contextlib.contextmanager
    def using(self, llm: AsyncLLM) -> Iterator[Adapter | None]:
        """The current adapter, which stays at least as long as the block."""
        adapter = self.current
        if adapter is None:
            yield None
            return
        adapter.users += 1
        try:
            yield adapter
        finally:
            adapter.users -= 1
            if not adapter.users:
                self._freed.set()
                self._freed = asyncio.Event()
            self._remove_unused(llm, adapter)

    def _remove_unused(self, llm: AsyncLLM, adapter: Adapter) -> None:
        if adapter.users or adapter is self.current:
            return
        self.live.remove(adapter)
        removal = asyncio.ensure_future(_remove(llm, adapter))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)


async def _remove(llm: AsyncLLM, adapter: Adapter) -> None:
    """Remove an adapter from the engine, then its directory."""
    try:
        # A request that ends at a stop string ends in this process first, and vLLM then aborts it.
        # A step before that abort could read the adapter again, so wait for one answer.
        await llm.is_sleeping()
        await llm.remove_lora(adapter.id)
    except Exception as error:  # the engine has died or ended, and its adapters with it
        logger.info("adapter of version %d was not removed: %s", adapter.version, error)
    await asyncio.to_thread(shutil.rmtree, adapter.request.lora_path, ignore_errors=True)


def adapter_scale(settings: Mapping[str, object]) -> float:
    """The factor of an adapter's product: lora_alpha / r, or lora_alpha / sqrt(r) with
    use_rslora."""
    alpha, rank = (float(cast("float", settings[key])) for key in ("lora_alpha", "r"))
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def write_adapter(directory: Path, staged: Staged, settings: Mapping[str, object]) -> None:
    """Write a staged adapter in PEFT's format, adapter_model.safetensors and adapter_config.json,
    into a new directory. Blocks: call it in a thread.

    Raises:
        StagingError: the files cannot be written. The directory has been removed.
    """
    try:
        directory.mkdir()
        (directory / "adapter_config.json").write_text(json.dumps(dict(settings)))
        with (
            open(staged.path, "rb") as source,
            open(directory / "adapter_model.safetensors", "wb") as file,
        ):
            header = _header(staged)
            file.write(len(header).to_bytes(8, "little") + header)
            for _, shape, dtype, start in staged.tensors:
                source.seek(start)
                file.write(source.read(math.prod(shape) * ITEM_BYTES[dtype]))
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise StagingError(
            f"{directory}: {error.strerror or error}; make room there, or set TMPDIR to another"
            " folder"
        ) from error


def _header(staged: Staged) -> bytes:
    """The JSON at the start of a safetensors file, padded so that the data are aligned."""
    tensors: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, dtype, _ in staged.tensors:
        begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        tensors[name] = {
            "dtype": FILE_DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    header = json.dumps(tensors).encode()
    return header + b" " * (-len(header) % 8)
