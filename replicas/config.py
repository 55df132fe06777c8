"""EngineConfig: everything an engine needs to know to start. Cluster and deploy only read and compose it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from espalier.replicas.errors import InvalidRequestError

Device = Literal["cpu", "cuda"]
KVDtype = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One replica's engine. Checked when made; raises InvalidRequestError naming the option.

    model_path: folder of the checkpoint. device: where it runs ("auto" is resolved before). kv_dtype: how keys and values are kept.
    max_context: tokens of prompt and reply together; None takes the model's own limit.
    block_size: tokens a KV block holds. kv_tokens: tokens all KV blocks hold together; None takes max_lanes x max_context, at most 65,536.
    max_lanes: sequences in one round. batch_tokens: rows in one round. max_waiting: requests that may wait.
    max_steps_in_flight: rounds planned before the first has come back, 1 or 2. prefix_cache: keep full blocks for later requests.
    cpu_threads: threads of this process on a CPU; None shares the machine's cores. cache_dir: decoded weights and records of first loads.
    progress_timeout_s: with work to do, the engine is unhealthy when no round has finished for so long.
    """

    model_path: Path
    device: Device = "cpu"
    kv_dtype: KVDtype = "fp32"
    max_context: int | None = None
    block_size: int = 16
    kv_tokens: int | None = None
    max_lanes: int = 16
    batch_tokens: int = 256
    max_waiting: int = 256
    max_steps_in_flight: int = 2
    prefix_cache: bool = True
    cpu_threads: int | None = None
    cache_dir: Path = Path("~/.cache/espalier")
    progress_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, message: str) -> None:
            if not ok:
                raise InvalidRequestError(f"{name}: {message}", param=name)

        require(self.device in ("cpu", "cuda"), "device", "must be cpu or cuda")
        require(self.kv_dtype in ("fp32", "fp16", "bf16"), "kv_dtype", "must be fp32, fp16 or bf16")
        require(self.max_context is None or self.max_context >= 2, "max_context", "must be at least 2 tokens")
        require(self.block_size in (16, 32, 64, 128), "block_size", "must be 16, 32, 64 or 128 tokens")
        require(
            self.kv_tokens is None or self.kv_tokens >= self.block_size, "kv_tokens", "must hold at least one block"
        )
        require(self.max_lanes >= 1, "max_lanes", "must be at least 1")
        require(
            self.batch_tokens >= self.max_lanes,
            "batch_tokens",
            "must be at least max_lanes, so that every lane can decode",
        )
        require(self.max_waiting >= 0, "max_waiting", "must be at least 0")
        require(self.max_steps_in_flight in (1, 2), "max_steps_in_flight", "must be 1 or 2")
        require(self.cpu_threads is None or self.cpu_threads >= 1, "cpu_threads", "must be at least 1")
        require(self.progress_timeout_s > 0, "progress_timeout_s", "must be positive")
