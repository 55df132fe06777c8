"""What an engine counts, in the quantities and buckets that vLLM made usual. Plain data: knows neither the engine nor Prometheus."""

import bisect
import copy
from dataclasses import dataclass, field

from espalier.replicas.request import FinishReason

TTFT_EDGES_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_EDGES_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST_EDGES_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS_EDGES = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
ROWS_EDGES = (1.0, *(float(2**power) for power in range(3, 15)))


@dataclass(slots=True)
class Histogram:
    """Counts of values by fixed upper edges (inclusive); the last count is of values above every edge."""

    edges: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.edges) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect.bisect_left(self.edges, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self.counts)


def _seconds_of_request() -> Histogram:
    return Histogram(REQUEST_EDGES_S)


def _tokens_of_request() -> Histogram:
    return Histogram(TOKENS_EDGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """What the devices of an engine count, all shards together.

    pool_bytes: of the counter pools, which kernels lock with. pool_growths: times that one was made larger, at load. poison_resets: times that one
    was zeroed because a round that used it failed. graph_captures, graph_replays: rounds captured, and rounds run by replaying one.
    device_bytes_used, device_bytes_total: memory of the devices, by whomever it is used. device_bytes_reserved: what PyTorch's allocator
    holds for this engine, all its tensors; not graphs themselves nor loaded kernels.
    """

    pool_bytes: int
    pool_growths: int
    poison_resets: int
    graph_captures: int
    graph_replays: int
    device_bytes_used: int
    device_bytes_total: int
    device_bytes_reserved: int


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Everything counted since the engine started. Times in seconds, measured on the replica.

    Gauges: running, waiting: requests. kv_usage: share of KV blocks that live sequences hold, 0..1. host_blocks, host_blocks_used: blocks that the
    host tier has room for, and that it holds.
    Counters: prompt_tokens, generation_tokens: of requests, prompts counted once when admitted, replayed tokens not at all.
    prefix_queries, prefix_hits: prompt tokens looked up and found in the prefix cache at first admission. prefix_host_hits: of those found, the
    ones that came back from the host tier. host_saves, host_restores: blocks copied to the host tier, and back. host_evictions: blocks that
    left it for others.
    prefill_rows, decode_rows: rows computed; a row is decode when it is the only one of its lane. preemptions: sequences sent back to the queue.
    finished: requests ended, by reason. steps: rounds committed.
    Histograms: ttft_s: from submission to the first token. inter_token_s: between tokens that followed each other.
    e2e_s, queue_s, prefill_s, decode_s: of requests, as in request.Timings. request_prompt_tokens, request_generation_tokens: of ended requests.
    rows_per_step: rows of each round. device: figures of the devices, None where there are none.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    host_blocks: int = 0
    host_blocks_used: int = 0

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_host_hits: int = 0
    host_saves: int = 0
    host_restores: int = 0
    host_evictions: int = 0
    prefill_rows: int = 0
    decode_rows: int = 0
    preemptions: int = 0
    steps: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))

    ttft_s: Histogram = field(default_factory=lambda: Histogram(TTFT_EDGES_S))
    inter_token_s: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_EDGES_S))
    e2e_s: Histogram = field(default_factory=_seconds_of_request)
    queue_s: Histogram = field(default_factory=_seconds_of_request)
    prefill_s: Histogram = field(default_factory=_seconds_of_request)
    decode_s: Histogram = field(default_factory=_seconds_of_request)
    request_prompt_tokens: Histogram = field(default_factory=_tokens_of_request)
    request_generation_tokens: Histogram = field(default_factory=_tokens_of_request)
    rows_per_step: Histogram = field(default_factory=lambda: Histogram(ROWS_EDGES))
    device: DeviceFigures | None = None

    def snapshot(self) -> "EngineStats":
        """A copy that no later round changes."""
        return copy.deepcopy(self)
