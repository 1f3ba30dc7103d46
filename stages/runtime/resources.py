"""The section `resources` of params.yaml: what the machines offer, and what is run on them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stages.runtime.validation import Section


class EngineParams(Section):
    """What generates in rollout, annotate and evaluate (stages/agent/player.py); rl always plays with the torch engine."""

    kind: Literal["torch", "vllm", "openai"] = "torch"
    """torch; vllm: vLLM in this process (extra `vllm`); openai: a server (extra `openai`)."""
    base_url: str = "http://127.0.0.1:8000/v1"
    """openai: the server. It serves each model under its folder's name, e.g. data/models/sft."""
    dialect: Literal["openai", "vllm", "transformers"] = "vllm"
    """openai: what the server understands beyond the fields of OpenAI's own API: nothing more, those of vLLM's server, or those
    of `transformers serve`."""
    text: bool = False
    """openai: evaluate takes a server's text where there are no token ids and log-probabilities; other stages need those."""
    requests: Annotated[int, Field(ge=1, le=4096)] = 16
    """openai: requests in flight at once."""
    check_turns: Annotated[int, Field(ge=0, le=10_000)] = 8
    """vllm, openai: first turns whose log-probabilities are compared with the policy's, computed here; 0: trust the server."""
    gpu_memory: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """vllm: share of the GPU's memory that it may take."""


class ShardParams(Section):
    """Processes among which rollout, annotate and evaluate divide their tasks (shards.py); the bytes stay the same."""

    count: Annotated[int, Field(ge=1, le=4096)] = 1
    """Shards per stage."""
    runner: Literal["processes", "dask", "ray"] = "processes"
    """processes: on this machine; dask, ray: tasks of a Prefect flow on such a cluster (extras `dask`, `ray`)."""
    address: str | None = None
    """Of the cluster's scheduler, e.g. tcp://10.0.0.1:8786 or ray://10.0.0.1:10001; null: one on this machine, for the run."""


class Resources(Section):
    """What the machine offers. Profiles change these and nothing else that bears on results."""

    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    """cpu, cuda, cuda:1 and so on."""
    threads: Annotated[int, Field(ge=1, le=256)] = 2
    """CPU threads per stage."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the layers' computations; weights, output layer and loss stay in float32."""
    slots: Annotated[int, Field(ge=4, le=4096)] = 128
    """Sessions the engine decodes at once."""
    tokens_per_batch: Annotated[int, Field(ge=256)] = 2048
    """Padded tokens in one micro-batch of training; changes memory and speed, and the loss by rounding alone."""
    workers: Annotated[int, Field(ge=1, le=256)] = 2
    """Processes that compile games and the like."""
    launch: str | None = None
    """A configuration of `accelerate launch` that sft and rl start under (profiles/accelerate/ddp.yaml); null: one process."""
    shards: ShardParams = ShardParams()
    engine: EngineParams = EngineParams()
