"""EngineConfig: everything an engine needs to know to start. Cluster and deploy only read and compose it."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from espalier.replicas.errors import InvalidRequestError

Device = Literal["cpu", "cuda"]
KVDtype = Literal["fp32", "fp16", "bf16"]

_DEFAULT_KV_DTYPE: dict[Device, KVDtype] = {"cpu": "fp32", "cuda": "fp16"}
_MEMORY_SHARE = 0.9
_DEFAULT_LANES: dict[Device, int] = {"cpu": 16, "cuda": 64}
_DEFAULT_BATCH_TOKENS: dict[Device, int] = {"cpu": 256, "cuda": 4096}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One replica's engine. Checked when made; raises InvalidRequestError naming the option.

    model_path: folder of the checkpoint. device: where it runs ("auto" is resolved before).
    kv_dtype: how keys and values are kept; None takes fp32 on a CPU and fp16 on a GPU, which has no fp32.
    max_context: tokens of prompt and reply together; None takes the model's own limit.
    block_size: tokens a KV block holds. kv_tokens: tokens all KV blocks hold together; None takes max_lanes x max_context, on a CPU at most 65,536.
    max_lanes: sequences in one round; None takes 16 on a CPU and 64 on a GPU. batch_tokens: rows in one round; None takes 256 and 4,096.
    max_waiting: requests that may wait. max_steps_in_flight: rounds of a track planned before the first has come back, 1 or 2.
    tracks: 1 computes prompts and decoding lanes in the same rounds, 2 in rounds of their own that run side by side.
    decode_gap_ms: beside decoding lanes, a round takes no more rows of prompts than are computed in so many milliseconds, where that was measured.
    prefix_cache: keep full blocks for later requests. cpu_threads: threads of this process on a CPU; None shares the machine's cores.
    host_kv_gb: GiB of host memory for blocks that the KV cache has no room for any more, beside the cache; 0 keeps none.
    memory_share: how much of a GPU's memory the engine may fill, over 0 and at most 1.
    cuda_graphs: rounds on a GPU are captured at load and replayed.
    nvtx: a GPU's planning, launching and waiting are marked as NVTX ranges, for a profiler to show.
    cache_dir: decoded weights and records of first loads.
    progress_timeout_s: with work to do, the engine is unhealthy when no round has finished for so long.
    """

    model_path: Path
    device: Device = "cpu"
    kv_dtype: KVDtype | None = None
    max_context: int | None = None
    block_size: int = 16
    kv_tokens: int | None = None
    max_lanes: int | None = None
    batch_tokens: int | None = None
    max_waiting: int = 256
    max_steps_in_flight: int = 2
    tracks: int = 1
    decode_gap_ms: float = 50.0
    prefix_cache: bool = True
    host_kv_gb: float = 0.0
    cpu_threads: int | None = None
    memory_share: float = _MEMORY_SHARE
    cuda_graphs: bool = True
    nvtx: bool = False
    cache_dir: Path = Path("~/.cache/espalier")
    progress_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, message: str) -> None:
            if not ok:
                raise InvalidRequestError(f"{name}: {message}", param=name)

        require(self.device in ("cpu", "cuda"), "device", "must be cpu or cuda")
        require(self.kv_dtype in (None, "fp32", "fp16", "bf16"), "kv_dtype", "must be fp32, fp16 or bf16")
        require(self.device != "cuda" or self.kv_dtype != "fp32", "kv_dtype", "must be fp16 or bf16 on a GPU")
        require(self.max_context is None or self.max_context >= 2, "max_context", "must be at least 2 tokens")
        require(self.block_size in (16, 32, 64, 128), "block_size", "must be 16, 32, 64 or 128 tokens")
        require(
            self.kv_tokens is None or self.kv_tokens >= self.block_size, "kv_tokens", "must hold at least one block"
        )
        require(self.max_lanes is None or self.max_lanes >= 1, "max_lanes", "must be at least 1")
        require(
            self.batch_tokens is None or self.batch_tokens >= (self.max_lanes or _DEFAULT_LANES[self.device]),
            "batch_tokens",
            "must be at least max_lanes, so that every lane can decode",
        )
        require(self.max_waiting >= 0, "max_waiting", "must be at least 0")
        require(self.max_steps_in_flight in (1, 2), "max_steps_in_flight", "must be 1 or 2")
        require(self.tracks in (1, 2), "tracks", "must be 1 or 2")
        require(self.decode_gap_ms > 0, "decode_gap_ms", "must be positive")
        require(self.host_kv_gb >= 0, "host_kv_gb", "must be at least 0")
        require(
            self.host_kv_gb == 0 or self.prefix_cache, "host_kv_gb", "keeps blocks of the prefix cache, which is off"
        )
        require(0 < self.memory_share <= 1, "memory_share", "must be over 0 and at most 1")
        if self.device == "cpu":
            require(
                self.memory_share == _MEMORY_SHARE, "memory_share", "is of a GPU's memory, and this replica has none"
            )
            require(self.cuda_graphs, "cuda_graphs", "are a GPU's, and this replica has none")
            require(not self.nvtx, "nvtx", "marks what a GPU's replica does, and this one has none")
        require(self.cpu_threads is None or self.cpu_threads >= 1, "cpu_threads", "must be at least 1")
        require(self.progress_timeout_s > 0, "progress_timeout_s", "must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """An EngineConfig in which the defaults that depend on the device are filled in."""

    kv_dtype: KVDtype
    max_lanes: int
    batch_tokens: int


def resolved(config: EngineConfig) -> ResolvedConfig:
    """The same options, with nothing left to the device. Lanes beyond the default rows of a round get rows."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    max_lanes = config.max_lanes or _DEFAULT_LANES[config.device]
    values["max_lanes"] = max_lanes
    values["kv_dtype"] = config.kv_dtype or _DEFAULT_KV_DTYPE[config.device]
    values["batch_tokens"] = config.batch_tokens or max(_DEFAULT_BATCH_TOKENS[config.device], max_lanes)
    return ResolvedConfig(**values)
