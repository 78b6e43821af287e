"""The arguments of vLLM: environment variables, engine config and sampling parameters.

The functions import vLLM themselves, which keeps this module cheap to import.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from asyncrl.contracts.adapters import may_be_linear
from asyncrl.contracts.messages import Details, GenerateRequest
from asyncrl.generation.settings import GeneratorApp
from asyncrl.runtime.processes.environment import passed_on
from asyncrl.runtime.processes.interfaces import interface_variables
from asyncrl.text.stops import Stops
from asyncrl.weights.engine import BACKEND, OWNED, SPIN_S, TOKENIZER_MODE
from asyncrl.weights.stored import stored_tensors

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.executor import Executor

    from asyncrl.generation.rendezvous import NodeRank


def engine_environment(device: str, num_threads: int = 1, nnodes: int = 1) -> dict[str, str]:
    """Environment variables of a process that runs an engine; its child processes inherit them.

    Args:
        num_threads: torch threads of each worker process on CPU.
        nnodes: nodes of the engine. With several, each process chooses its address itself
            (`asyncrl.generation.rendezvous.use_own_address`).

    The user's variables for torch, vLLM and similar libraries pass through
    (`asyncrl.runtime.processes.environment`), unless asyncrl needs another value.
    """
    required = {
        OWNED: "1",
        "VLLM_PLUGINS": "asyncrl_weights,asyncrl_outputs",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_COLOR": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if nnodes == 1:
        # The processes of an engine are on one node, and listen there only.
        required |= {"VLLM_HOST_IP": "127.0.0.1", **interface_variables("lo")}
    if device == "cpu":
        # vLLM would pin its threads to cores, and idle threads would spin; replicas and learner
        # share the cores. Without TORCH_COMPILE_DISABLE, the first generation runs a C++ compiler
        # for one small kernel of the sampler, for about 15 s.
        defaults = {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(num_threads),
            "OMP_WAIT_POLICY": "passive",
            SPIN_S: "0.05",
            "TORCH_COMPILE_DISABLE": "1",
        }
        required["VLLM_PLUGINS"] += ",asyncrl_seeds,asyncrl_adapters"
        return defaults | passed_on(os.environ) | required
    return passed_on(os.environ) | required


def engine_config(
    app: GeneratorApp, node: NodeRank | None = None
) -> tuple[VllmConfig, type[Executor]]:
    """vLLM's config and executor class.

    Args:
        node: which node of the engine this is. None: the engine has one node.
    """
    from vllm.config import WeightTransferConfig
    from vllm.config.lora import MaxLoRARanks
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor import Executor, UniProcExecutor

    generator = app.generator
    arguments = AsyncEngineArgs(
        model=app.model,
        dtype=app.dtype,
        max_num_seqs=app.max_num_seqs,
        seed=app.seed,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        worker_extension_cls="asyncrl.weights.engine_fingerprints.EngineFingerprints",
        trust_remote_code=False,
        tokenizer_mode=TOKENIZER_MODE,
        load_format="safetensors",
    )
    if app.max_model_len is not None:
        arguments.max_model_len = app.max_model_len
    if app.cache_block is not None:
        arguments.block_size = app.cache_block
    if app.max_lora_rank is not None:
        arguments.enable_lora = True
        arguments.max_lora_rank = next(
            rank for rank in get_args(MaxLoRARanks) if rank >= app.max_lora_rank
        )
        arguments.max_loras = app.max_loras
        arguments.lora_target_modules = _linear_layers(app.model)
        # A version is loaded before its first request. Without this room it would push one out of
        # memory that running requests use.
        arguments.max_cpu_loras = app.max_loras + 1
    workers = generator.workers
    arguments.tensor_parallel_size = generator.tensor_parallel_size
    arguments.pipeline_parallel_size = generator.pipeline_parallel_size
    arguments.enable_expert_parallel = generator.expert_parallel
    if workers > 1:
        # By default vLLM would use Ray here, because a replica is in a placement group.
        arguments.distributed_executor_backend = "mp"
    if node is not None:
        arguments.nnodes, arguments.node_rank = generator.nnodes, node.node_rank
        arguments.master_addr, arguments.master_port = node.master_addr, node.master_port
    if generator.device != "cpu":
        arguments.gpu_memory_utilization = generator.gpu_share
        arguments.enable_sleep_mode = app.sleeps
        # Without it, vLLM reads at most 2,048 tokens in a step; a run's prompts come in batches.
        config = arguments.create_engine_config(UsageContext.LLM_CLASS)
        return config, Executor.get_class(config)
    arguments.kv_cache_memory_bytes = generator.kv_cache_memory_bytes // workers
    arguments.enforce_eager = True
    # A chunked prefill of a seeded request, as in a recompute of many requests, makes vLLM rewind a
    # random generator. A CPU generator of torch cannot be rewound, so the engine would die.
    arguments.enable_chunked_prefill = False
    if arguments.create_model_config().has_inner_state:
        # vLLM caches the state of a prefix only with chunked prefill.
        arguments.enable_prefix_caching = False
    config = arguments.create_engine_config()
    if workers > 1:
        return config, Executor.get_class(config)
    # By default vLLM runs a CPU worker in a separate process, to bind its threads. These threads
    # are not bound. One process saves an import of vLLM, and the core that polling between the two
    # processes takes.
    config.parallel_config.distributed_executor_backend = "uni"
    return config, UniProcExecutor


def _linear_layers(model_path: str) -> list[str]:
    """Last parts of the names of the layers that may have an adapter. The output head is not among
    them: vLLM cannot compute the log-probs of a prompt with a head that may have one."""
    return sorted(
        {
            name.removesuffix(".weight").rpartition(".")[2]
            for name, tensor in stored_tensors(model_path).items()
            if may_be_linear(name, tensor.shape)
        }
    )


def sampling_params(request: GenerateRequest, stops: Stops) -> SamplingParams:
    """Parameters of a request whose completions are returned whole, with their log-probs."""
    from vllm import SamplingParams
    from vllm.sampling_params import (
        RepetitionDetectionParams,
        RequestOutputKind,
        StructuredOutputsParams,
    )

    ngram, times = request.repetition or (0, 0)
    return SamplingParams(
        n=request.n,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=request.seed,
        ignore_eos=request.ignore_eos,
        stop_token_ids=list(stops.tokens),
        repetition_detection=(
            RepetitionDetectionParams(max_pattern_size=ngram, min_count=times) if ngram else None
        ),
        structured_outputs=(
            None if request.schema is None else StructuredOutputsParams(json=request.schema)
        ),
        stop=list(stops.strings),
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(stops.strings),  # vLLM searches only the text for stop strings
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def stream_params(request: GenerateRequest, stops: Stops, details: Details) -> SamplingParams:
    """Parameters of one completion that is returned in pieces. vLLM generates at least one token,
    even when only the prompt is read."""
    from vllm.sampling_params import RequestOutputKind

    params = sampling_params(replace(request, max_tokens=max(request.max_tokens, 1)), stops)
    params.logprobs = details.top
    params.prompt_logprobs = details.top if details.prompt else None
    params.output_kind = RequestOutputKind.FINAL_ONLY if details.whole else RequestOutputKind.DELTA
    return params


def greedy(request: GenerateRequest) -> GenerateRequest:
    """The request for the prompt's greedy completion, with the limits and stops of this one."""
    return replace(
        request, n=1, temperature=0.0, seed=None, top_p=1.0, top_k=0, min_p=0.0, baseline=False
    )


def sibling_params(params: SamplingParams, index: int) -> SamplingParams:
    """Parameters of one of n completions as a separate request. vLLM gives it the same seed in a
    request for all n."""
    sibling = params.clone()
    sibling.n = 1
    sibling.seed = None if params.seed is None else params.seed + index
    return sibling


def scoring_params() -> SamplingParams:
    """Parameters of a request for the log-probs of its prompt. vLLM always generates one more
    token."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
