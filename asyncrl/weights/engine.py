"""Entry point that makes the weight-transfer backend known to vLLM. vLLM loads it in every process of an engine, so it imports nothing at the top."""

BACKEND = "asyncrl_staged"
"""Name of the backend, for `WeightTransferConfig(backend=...)`."""


def register() -> None:
    """Register the backend; a second call changes nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(BACKEND, "asyncrl.weights.apply", "StagedWeights")
    except ValueError:
        # vLLM loads its plugins more than once in one process, and refuses a name that it knows.
        return
