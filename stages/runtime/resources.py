"""Section `resources` of params.yaml: the machines, and the engine that generates on them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stages.runtime.cores import available_cores
from stages.runtime.validation import Section


class EngineParams(Section):
    """The engine of rollout, annotate and evaluate; rl always uses the torch engine. See docs/cluster.md."""

    kind: Literal["torch", "vllm", "openai"] = "torch"
    """torch; vllm: vLLM in this process (extra `vllm`); openai: a server (extra `openai`)."""
    base_url: str = "http://127.0.0.1:8000/v1"
    """openai: the server, which serves each model under its folder's name, such as data/models/sft."""
    dialect: Literal["openai", "vllm", "transformers"] = "vllm"
    """openai: extensions of OpenAI's API that the server supports: none, vLLM's, or those of `transformers serve`."""
    text: bool = False
    """openai: evaluate accepts text from servers that return no token ids and log-probabilities; other stages need those."""
    requests: Annotated[int, Field(ge=1, le=4096)] = 16
    """openai: concurrent requests."""
    check_turns: Annotated[int, Field(ge=0, le=10_000)] = 8
    """vllm, openai: turns whose log-probabilities are first compared with those computed here; 0: no check."""
    gpu_memory: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """vllm: share of the GPU's memory that it may take."""


class ShardParams(Section):
    """Processes that share the tasks of rollout, annotate and evaluate; outputs are the same bytes."""

    count: Annotated[int, Field(ge=1, le=4096)] = 1
    """Shards per stage."""
    runner: Literal["processes", "dask", "ray"] = "processes"
    """processes: on this machine; dask, ray: on such a cluster (extras `dask`, `ray`)."""
    address: str | None = None
    """The cluster's scheduler, such as tcp://10.0.0.1:8786 or ray://10.0.0.1:10001; null: start one on this machine."""


class Resources(Section):
    """The machine, as profiles describe it. Of these keys, device, threads, precision, tokens_per_batch, launch and the engine
    can change results, by rounding; the others change speed alone."""

    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    """cpu, cuda, cuda:1 and so on."""
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    """CPU threads per process. Another number changes the last bits of results, so that stages run again; more workers do not."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the layers' computations; weights, output layer and loss stay in float32."""
    slots: Annotated[int, Field(ge=4, le=4096)] = 128
    """Sequences that the engine decodes at once."""
    tokens_per_batch: Annotated[int, Field(ge=256)] = 2048
    """Tokens in one micro-batch of training: different ones where the model can share prefixes, else padded ones. Affects memory
    and speed, and the loss by rounding only."""
    workers: Annotated[int, Field(ge=1, le=256)] = Field(default_factory=available_cores)
    """Processes that share a stage's work on the CPU (games, episodes, trees, training); default: this machine's cores. On a
    GPU they hold the environments, which step while it generates. Their number changes no result."""
    launch: str | None = None
    """Configuration file of `accelerate launch` for sft and rl, such as profiles/accelerate/ddp.yaml; null: one process."""
    shards: ShardParams = ShardParams()
    engine: EngineParams = EngineParams()
