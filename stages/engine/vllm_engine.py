"""Generation by vLLM in this process, with its continuous batching, paged cache and prefix cache.

Log-probabilities are `processed_logprobs`: those of the sampled distribution, after temperature, top-k and top-p. vLLM seeds a
generator per request from the turn's key, so a turn's random draws do not depend on its neighbours; the last bits of the logits
may, unless vLLM uses batch-invariant kernels (VLLM_BATCH_INVARIANT=1, where available).
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from stages.engine.adapters import CONFIG, Adapter, is_adapter
from stages.engine.completion_engine import TurnRequest, TurnResult
from stages.engine.engine import EngineError, EngineSettings, Pause
from stages.engine.openai_engine import seed_of

LORA_RANKS = (8, 16, 32, 64, 128, 256, 512)
"""What vLLM reserves memory for."""


class VllmBackend:
    """A `Backend` for the model in `folder`, or for a LoRA adapter and its base. Raises EngineError if vLLM is not installed, or
    for an adapter whose rank is above LORA_RANKS."""

    def __init__(self, folder: Path, end_of_turn: int, settings: EngineSettings) -> None:
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # its core runs in this process, so that both end together
        try:
            from vllm import EngineArgs, LLMEngine
            from vllm.lora.request import LoRARequest
        except ImportError as error:
            raise EngineError(
                f"resources.engine.kind vllm needs vLLM, which can't be imported ({error}): pip install 'bellwether[vllm]' in a "
                "separate environment, since vLLM pins its torch version, or set kind to torch"
            ) from error
        self.end_of_turn = end_of_turn
        self._lora: LoRARequest | None = None
        adapter: dict[str, Any] = {}
        base = folder
        if is_adapter(folder):
            base = Adapter(folder).base
            self._lora = LoRARequest(folder.name, 1, str(folder))
            rank = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["r"]
            if rank > LORA_RANKS[-1]:
                raise EngineError(f"{folder}: vLLM serves adapters of rank {LORA_RANKS[-1]} at most, and this one has {rank}")
            adapter = {"enable_lora": True, "max_lora_rank": next(size for size in LORA_RANKS if size >= rank)}
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(base),
                dtype="bfloat16" if settings.precision == "bfloat16" else "float32",
                max_model_len=settings.max_length,
                max_num_seqs=settings.slots,
                gpu_memory_utilization=settings.gpu_memory,
                enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",
                generation_config="vllm",  # ignore sampling settings in the model's folder
                disable_log_stats=True,
                **adapter,
            )
        )

    def start(self, request: TurnRequest) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            seed=seed_of(request.key),
            logprobs=0,  # of the sampled token only
            stop_token_ids=[self.end_of_turn],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = TokensPrompt(prompt_token_ids=list(request.token_ids))
        self._engine.add_request(str(request.session), prompt, params, lora_request=self._lora)

    def wait(self, pause: Pause | None = None) -> list[TurnResult]:
        done: list[TurnResult] = []
        while not done and self._engine.has_unfinished_requests() and not (pause and pause()):
            done = [self._result(output) for output in self._engine.step() if output.finished]
        return done

    def cancel(self, sessions: Collection[int]) -> None:
        self._engine.abort_request([str(session) for session in sessions])

    def close(self) -> None:
        """Release the GPU's memory."""
        import gc

        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        del self._engine
        gc.collect()
        cleanup_dist_env_and_memory()

    def _result(self, output: Any) -> TurnResult:
        completion = output.outputs[0]
        ids = tuple(int(token) for token in completion.token_ids)
        if completion.logprobs is None or len(completion.logprobs) != len(ids):
            raise EngineError(f"vLLM returned {len(ids)} tokens but no log-probability for each")
        values = tuple(float(at[token].logprob) for token, at in zip(ids, completion.logprobs, strict=True))
        return TurnResult(int(output.request_id), ids, values, completion.finish_reason == "stop")
