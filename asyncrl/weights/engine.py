"""Entry point that vLLM loads in every process of an engine, so it imports nothing at the top: our
weight backend, our tokenizer, and an end with the parent."""

BACKEND = "asyncrl_staged"
"""Name of the backend, for `WeightTransferConfig(backend=...)`."""

TOKENIZER_MODE = "asyncrl"
"""Value of vLLM's tokenizer_mode that makes it use the run's own tokenizer."""

OWNED = "ASYNCRL_OWNS_ENGINE"
"""Environment variable that marks the engines that asyncrl starts; other uses of vLLM in the same
environment are left alone."""

STACKS = "ASYNCRL_STACKS"
"""Environment variable: folder in which an engine's process writes its stacks when it gets SIGUSR2,
as `<process id>.txt`."""


def register() -> None:
    """Register backend and tokenizer; a second call changes nothing."""
    import os

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry

    try:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "asyncrl.weights.apply", "StagedWeights"
        )
    except ValueError:
        # vLLM loads its plugins more than once in one process, and refuses a name that it knows.
        return
    TokenizerRegistry.register(TOKENIZER_MODE, "asyncrl.generation.tokenizer", "EngineTokenizer")
    RENDERER_REGISTRY.register(TOKENIZER_MODE, "vllm.renderers.hf", "HfRenderer")
    if os.environ.get(OWNED):
        _end_with_parent()
        _bars_without_semaphore()
    if folder := os.environ.get(STACKS):
        _register_stacks(folder)


def _register_stacks(folder: str) -> None:
    import faulthandler
    import os
    import signal
    from pathlib import Path

    from asyncrl.runtime.files import append_to

    faulthandler.register(
        signal.SIGUSR2, append_to(Path(folder).resolve() / f"{os.getpid()}.txt"), all_threads=True
    )  # the handler keeps the file


def _bars_without_semaphore() -> None:
    """The lock of tqdm's progress bars is a named semaphore in a spawned process: a file in shared
    memory, which stays when the process is killed."""
    import threading

    import tqdm

    tqdm.tqdm.set_lock(threading.RLock())


def _end_with_parent() -> None:
    """Kill this process when the one that spawned it is gone: vLLM's engine process does not notice
    that its replica was killed, and would stay."""
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
