"""vLLM plugin: registers the weight backend and the tokenizer, and ends a process with its
parent.

vLLM loads this module in every process of an engine, so it imports nothing at the top.
"""

BACKEND = "asyncrl_staged"
"""Name of the weight backend, for `WeightTransferConfig(backend=...)`."""

TOKENIZER_MODE = "asyncrl"
"""Value of vLLM's tokenizer_mode that makes it use the run's own tokenizer."""

OWNED = "ASYNCRL_OWNS_ENGINE"
"""Environment variable that marks engines started by asyncrl. The plugin does not change the
processes of other vLLM programs in the same environment."""

STACKS = "ASYNCRL_STACKS"
"""Environment variable: the folder for stack dumps. On SIGUSR2, an engine's process writes its
stacks to `<process id>.txt` there."""

SPIN_S = "ASYNCRL_SPIN_S"
"""Environment variable: seconds for which a worker of an engine polls shared memory for its next
message before it waits for a signal."""


def register() -> None:
    """Register the weight backend and the tokenizer. A second call has no effect."""
    import os

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry

    try:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "asyncrl.weights.apply", "StagedWeights"
        )
    except ValueError:
        # vLLM may load plugins more than once in a process, and rejects a name that is registered.
        return
    TokenizerRegistry.register(
        TOKENIZER_MODE, "asyncrl.generation.engine.tokenizer", "EngineTokenizer"
    )
    RENDERER_REGISTRY.register(TOKENIZER_MODE, "vllm.renderers.hf", "HfRenderer")
    if os.environ.get(OWNED):
        _end_with_parent()
        _bars_without_semaphore()
        _named_shared_memory()
    if seconds := os.environ.get(SPIN_S):
        _spin_for(float(seconds))
    if folder := os.environ.get(STACKS):
        _register_stacks(folder)


def _register_stacks(folder: str) -> None:
    import faulthandler
    import os
    import signal
    from pathlib import Path

    from asyncrl.runtime.files.opening import append_to

    faulthandler.register(
        signal.SIGUSR2, append_to(Path(folder).resolve() / f"{os.getpid()}.txt"), all_threads=True
    )  # the handler keeps the file open


def _bars_without_semaphore() -> None:
    """Give tqdm's progress bars a thread lock. In a spawned process, tqdm's default is a named
    semaphore, a file in shared memory that remains when the process is killed."""
    import threading

    import tqdm

    tqdm.tqdm.set_lock(threading.RLock())


def _named_shared_memory() -> None:
    """Give shared memory of this process a name with its process id. vLLM's queues between
    the workers of an engine remain when it is killed, and `asyncrl.weights.staging.sweep` deletes
    those of ended processes."""
    import os
    import secrets
    from multiprocessing import shared_memory

    def name() -> str:
        return f"/asyncrl-{secrets.token_hex(4)}-{os.getpid()}.queue"

    shared_memory._make_filename = name  # type: ignore[attr-defined]


def _spin_for(seconds: float) -> None:
    """Set how long a worker polls for its next message. vLLM's second suits a GPU's process with a
    core of its own. On shared cores, workers would take them from all others between messages."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.__init__.__defaults__ = (seconds,)


def _end_with_parent() -> None:
    """Kill this process when its parent process ends. vLLM's engine process does not notice that
    its replica was killed, and would keep running."""
    import multiprocessing
    import multiprocessing.connection
    import os
    import signal
    import threading

    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def wait() -> None:
        multiprocessing.connection.wait([sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()
