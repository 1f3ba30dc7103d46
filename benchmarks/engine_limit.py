"""engine_share_of_limit: the engine's decode tokens per second as a share of a bare forward loop's.

The bare loop runs the same model on the same number of rows with a preallocated key/value cache: one forward pass and the output
layer per token, without sampling, masks or stop tokens, with the faster attention kernel. All rows have the same length, the best
case for the bare loop.
"""

from __future__ import annotations

from typing import Any

from benchmarks.measure import Options, Result, Side, alternate, fastest
from benchmarks.models import load, make_model, named, sizes
from stages.seeding import stream

PROMPT, DECODED = 64, 128
AGAINST = "a bare forward loop, same batch, preallocated cache"


def prompts(rows: int, vocabulary: int) -> list[list[int]]:
    rng = stream("benchmarks.limit", rows)
    return [[rng.randrange(vocabulary) for _ in range(PROMPT)] for _ in range(rows)]


def ours(options: Options, size: str, rows: int, decoded: int) -> Side:
    """Turns of `decoded` tokens in sessions with cached prompts and one sampled token."""
    from stages.engine.engine import Sampling
    from stages.engine.torch_engine import TorchEngine

    model, tokenizer = load(make_model(options, size), "sdpa", options.device, options.precision)
    engine = TorchEngine(model, [], rows, PROMPT + decoded + 8)
    texts = prompts(rows, len(tokenizer))
    sessions: list[int] = []

    def turn(tokens: int) -> int:
        for session in sessions:
            engine.request(session, session, Sampling(max_tokens=tokens))
        made = left = 0
        while left < len(sessions):
            finished = engine.advance()
            made, left = made + sum(len(item.token_ids) for item in finished), left + len(finished)
        return made

    def before() -> None:
        engine.reset()
        sessions[:] = [engine.open(text) for text in texts]
        turn(1)

    return Side("bellwether", lambda: turn(decoded), before)


def make_cache(config: Any, rows: int, length: int) -> Any:
    """A preallocated transformers cache for `rows` rows of equal length and `length` positions."""
    import torch
    from transformers.cache_utils import Cache

    class Preallocated(Cache):
        def __init__(self) -> None:
            super().__init__(layers=[])
            heads = config.num_key_value_heads
            size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            self.data = torch.zeros(config.num_hidden_layers, 2, rows, heads, length, size, dtype=config.dtype)
            self.start = 0

        def update(self, keys: Any, values: Any, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
            end = self.start + keys.shape[2]
            for part, states in enumerate((keys, values)):
                self.data[layer_idx, part, :, :, self.start : end] = states
            return self.data[layer_idx, 0, :, :, :end], self.data[layer_idx, 1, :, :, :end]

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return self.start

    return Preallocated()


def limit(model: Any, rows: int, decoded: int, attention: str) -> Side:
    """The bare loop. It feeds fixed tokens, so that even token selection costs nothing."""
    import torch

    cache = make_cache(model.config, rows, PROMPT + decoded)
    ids = torch.tensor(prompts(rows, model.config.vocab_size))
    decoder, head = model.base_model, model.get_output_embeddings()

    def forward(tokens: torch.Tensor, first: int) -> None:
        cache.start = first
        positions = torch.arange(first, first + tokens.shape[1])[None]
        output = decoder(input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True)
        head(output.last_hidden_state[:, -1])

    def before() -> None:
        with torch.inference_mode():
            forward(ids, 0)

    def run() -> float:
        with torch.inference_mode():
            for step in range(decoded):
                forward(ids[:, step % PROMPT, None], PROMPT + step)
        return rows * decoded

    return Side(f"bare loop {attention}", run, before)


def measure_size(options: Options, size: str, rows: int = 64, decoded: int = DECODED) -> Result:
    rows, decoded = options.size(rows, 4), options.size(decoded, 4)
    mine = ours(options, size, rows, decoded)
    folder = make_model(options, size)
    candidates = [
        lambda kernel=kernel: limit(load(folder, kernel, precision=options.precision)[0], rows, decoded, kernel)  # type: ignore[misc]
        for kernel in ("sdpa", "eager")
    ]
    other, trials = fastest(candidates, options)
    notes = {"rows": rows, "tokens": {"prompt": PROMPT, "decoded": decoded}, "theirs": other.label, "trials": trials}
    return Result("tokens/s", AGAINST, "rate", *alternate(mine, other, options), notes=notes)


def measure(options: Options) -> dict[str, Result]:
    return {named("engine_share_of_limit", size): measure_size(options, size) for size in sizes(options)}
