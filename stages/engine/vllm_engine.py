"""Generation by vLLM in this process, on its continuous batching, paged cache and prefix cache.

Log-probabilities are requested as `processed_logprobs`: those of the distribution that is drawn from, after temperature, top-k
and top-p. Random numbers are vLLM's: each request has a generator seeded from the turn's key, so a turn's draws do not depend on
its neighbours; the logits do, in their last bits, as far as vLLM's kernels sum in another order in another batch
(VLLM_BATCH_INVARIANT=1 asks it for kernels that do not, where it has them).
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.engine.adapters import CONFIG, Adapter, is_adapter
from stages.engine.completion_engine import TurnRequest, TurnResult
from stages.engine.engine import EngineError, Pause
from stages.engine.openai_engine import seed_of

if TYPE_CHECKING:
    from stages.agent.player import EngineSettings


class VllmBackend:
    """A `Backend`; `folder` holds a model, or a LoRA adapter, whose base is then served with it.

    Raises EngineError if vLLM is not installed.
    """

    def __init__(self, folder: Path, end_of_turn: int, settings: EngineSettings) -> None:
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # its core in this process, so that both end together
        try:
            from vllm import EngineArgs, LLMEngine
            from vllm.lora.request import LoRARequest
        except ImportError as error:
            raise EngineError(
                "resources.engine.kind vllm needs vLLM, which is not installed or does not load here "
                f"({error}): pip install 'bellwether[vllm]' in an environment of its own, since vLLM pins its torch, or set kind "
                "to torch"
            ) from error
        self.end_of_turn = end_of_turn
        self._lora: LoRARequest | None = None
        adapter: dict[str, Any] = {}
        base = folder
        if is_adapter(folder):
            base = Adapter(folder).base
            self._lora = LoRARequest(folder.name, 1, str(folder))
            rank = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["r"]
            adapter = {
                "enable_lora": True,
                "max_lora_rank": next(size for size in (8, 16, 32, 64, 128, 256, 512) if size >= rank),
            }
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(base),
                dtype="bfloat16" if settings.precision == "bfloat16" else "float32",
                max_model_len=settings.max_length,
                max_num_seqs=settings.slots,
                gpu_memory_utilization=settings.gpu_memory,
                enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",
                generation_config="vllm",  # no sampling settings from the model's folder
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
            logprobs=0,  # the drawn token's alone
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
            done = [self._answer(output) for output in self._engine.step() if output.finished]
        return done

    def cancel(self, sessions: Collection[int]) -> None:
        self._engine.abort_request([str(session) for session in sessions])

    def close(self) -> None:
        """Give the GPU's memory back."""
        import gc

        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        del self._engine
        gc.collect()
        cleanup_dist_env_and_memory()

    def _answer(self, output: Any) -> TurnResult:
        """A finished request's tokens and their log-probabilities."""
        completion = output.outputs[0]
        ids = tuple(int(token) for token in completion.token_ids)
        if completion.logprobs is None or len(completion.logprobs) != len(ids):
            raise EngineError(f"vLLM returned {len(ids)} tokens without a log-probability for each")
        values = tuple(float(at[token].logprob) for token, at in zip(ids, completion.logprobs, strict=True))
        return TurnResult(int(output.request_id), ids, values, completion.finish_reason == "stop")
