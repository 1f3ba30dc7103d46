"""Why FSDP, which shards weights and optimisers, can't train in some ways, and the remedies. Light to import."""

from __future__ import annotations

DDP = "use profiles/accelerate/ddp.yaml"
LORA = f"FSDP shards trained parameters, and with model.lora these are few: {DDP}, or set model.lora.rank to 0"
SPARSE = f"rl.sparse selects among all of a tensor's weights, which FSDP shards: {DDP}"
WARM_START = f"rl.warm_start trains the policy twice, which FSDP can't: {DDP}, or set it to {{}}"
