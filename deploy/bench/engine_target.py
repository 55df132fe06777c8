"""An engine in this process as a bench target: its loop alone, without Ray, HTTP or a gateway. Times are of when its reports arrive.

Wants nothing but what the engine wants: the tokenizer's packages are imported for prompts of text only, torch's by the shards.
"""

import itertools
import platform
import resource
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from espalier.deploy.bench.prompts import BenchPrompt
from espalier.deploy.bench.stats import StreamRecord
from espalier.deploy.bench.target import BenchError, Call, TargetInfo, TargetState
from espalier.replicas.config import EngineConfig
from espalier.replicas.detokenizer import NoText, TextDecoder
from espalier.replicas.engine import Engine
from espalier.replicas.errors import EngineError, InvalidRequestError
from espalier.replicas.group import ShardGroup
from espalier.replicas.report import RoundReport
from espalier.replicas.request import Finish, FinishReason, Request, TokenEvent
from espalier.replicas.token_hash import token_sha256

if TYPE_CHECKING:
    from espalier.replicas.tokenizer import Tokenizer


@dataclass(slots=True)
class _Live:
    """A call under way. The engine's thread alone writes to it once it is submitted."""

    call: Call
    request_id: str
    sent: float
    future: Future[StreamRecord] = field(default_factory=Future)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    is_leaving: bool = False

    def record(self, ended: float, finish: Finish | None, error: str | None = None) -> StreamRecord:
        """What the client saw. finish: None when the engine did not take the request."""
        left = finish is not None and finish.reason is FinishReason.CANCELLED and self.is_leaving
        if finish is not None and finish.error is not None:
            error = f"{type(finish.error).__name__}: {finish.error.message}"
        elif finish is not None and finish.token_sha256 != token_sha256(self.token_ids):
            error = f"the reply reports token_sha256 {finish.token_sha256}, its tokens hash to {token_sha256(self.token_ids)}"
        elif finish is not None and finish.reason is FinishReason.CANCELLED and not left:
            error = "cancelled, and nobody asked for it"
        return StreamRecord(
            prompt=self.call.prompt.name,
            sent=self.sent,
            arrivals=tuple(self.arrivals),
            ended=ended,
            prompt_tokens=0 if finish is None else finish.usage.prompt_tokens,
            cached_tokens=0 if finish is None else finish.usage.cached_tokens,
            token_ids=tuple(self.token_ids),
            token_sha256=None if finish is None or left or error is not None else finish.token_sha256,
            left=left,
            error=error,
        )


class EngineTarget:
    """Runs calls on an engine that it starts. group: the loaded shards. tokenizer: None serves prompts of token ids only."""

    def __init__(self, config: EngineConfig, group: ShardGroup, tokenizer: "Tokenizer | None") -> None:
        self._tokenizer = tokenizer
        text: TextDecoder = NoText() if tokenizer is None else tokenizer
        self._engine = Engine(config, group, text)
        self._live: dict[str, _Live] = {}
        self._ids = itertools.count()
        # Clients leave on a thread of their own, at moments of its own: the engine's may not wait for itself.
        self._leaver = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bench-leaver")
        shard = group.info
        self.info = TargetInfo(
            where="engine loop",
            model=config.model_path.name,
            device=device_name(config.device),
            max_context=min(shard.max_context, shard.num_blocks * shard.block_size + 1),
            vocab_size=shard.vocab_size,
            block_size=shard.block_size,
            kv_tokens=shard.num_blocks * shard.block_size,
            numerics_id=shard.numerics_id,
            quantization=shard.quantization,
            is_exact=True,
            can_skip_cache=True,
            setup=versions(config.device),
        )
        self._engine.start(self._sink)

    def submit(self, calls: Sequence[Call]) -> list[Future[StreamRecord]]:
        """One after the other, as fast as the engine takes them: the first may be a round ahead of the last."""
        lives = [_Live(call, f"bench-{next(self._ids)}", 0.0) for call in calls]
        requests = [self._request(live) for live in lives]
        for live, request in zip(lives, requests, strict=True):
            self._live[live.request_id] = live
            live.sent = time.perf_counter()
            if isinstance(request, EngineError):
                self._refused(live, request)
                continue
            try:
                self._engine.submit(request)
            except EngineError as error:
                self._refused(live, error)
                continue
            if live.call.leave_after == 0:
                self._leave(live)
        return [live.future for live in lives]

    def _request(self, live: _Live) -> Request | EngineError:
        call = live.call
        try:
            return Request(
                request_id=live.request_id,
                prompt_token_ids=self.token_ids(call.prompt),
                params=call.params,
                arrival_time=time.time(),
                use_prefix_cache=call.use_prefix_cache,
            )
        except EngineError as error:
            return error

    def _refused(self, live: _Live, error: EngineError) -> None:
        del self._live[live.request_id]
        live.future.set_result(live.record(time.perf_counter(), None, f"{type(error).__name__}: {error.message}"))

    def _leave(self, live: _Live) -> None:
        live.is_leaving = True
        self._leaver.submit(self._engine.abort, live.request_id)

    def _sink(self, report: RoundReport) -> None:
        now = time.perf_counter()
        for event in report.events:
            self._take(self._live[event.request_id], event, now)

    def _take(self, live: _Live, event: TokenEvent, now: float) -> None:
        if event.token_ids:
            live.arrivals.append((now, len(event.token_ids)))
            live.token_ids += event.token_ids
        limit = live.call.leave_after
        if event.finish is not None:
            del self._live[live.request_id]
            live.future.set_result(live.record(now, event.finish))
        elif limit is not None and len(live.token_ids) >= limit and not live.is_leaving:
            self._leave(live)

    def token_ids(self, prompt: BenchPrompt) -> tuple[int, ...]:
        """By the model's own tokenizer and chat template."""
        if prompt.token_ids:
            return prompt.token_ids
        if self._tokenizer is None:
            raise BenchError(f"prompt {prompt.name} is text, and the engine runs without its tokenizer")
        return chat_token_ids(self._tokenizer, prompt)

    def state(self) -> TargetState:
        """The engine's own figures, and those of this process."""
        load, stats = self._engine.load(), self._engine.stats()
        device = stats.device
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return TargetState(
            num_live=load.running + load.waiting,
            held_share=1.0 - load.free_blocks / load.total_blocks,
            device_bytes=None if device is None else device.device_bytes_reserved,
            host_bytes=usage.ru_maxrss * 1024,
            cpu_s=usage.ru_utime + usage.ru_stime,
            counts={"rounds": stats.steps, "preemptions": stats.preemptions}
            | ({} if device is None else asdict(device)),
        )

    def close(self) -> None:
        """Stops the engine and its shards."""
        self._leaver.shutdown()
        self._engine.stop()


def open_engine_target(config: EngineConfig, *, reads_text: bool) -> EngineTarget:
    """Loads the model. reads_text: False leaves its tokenizer alone. Raises CheckpointError, InvalidRequestError or EngineError."""
    from espalier.replicas.open import open_group

    tokenizer = open_tokenizer(config.model_path) if reads_text else None
    return EngineTarget(config, open_group(config), tokenizer)


def open_tokenizer(folder: Path) -> "Tokenizer":
    """The model's own. Raises CheckpointError naming the file at fault, InvalidRequestError where it, or what reads it, is not here."""
    try:
        from espalier.replicas.tokenizer import Tokenizer
    except ImportError as error:
        raise InvalidRequestError(
            f"--engine: prompts of text need the package {error.name}; without it, give --prompt-tokens or a file of token ids",
            param="engine",
        ) from None
    tokenizer = Tokenizer.from_folder(folder)
    if not tokenizer.has_chat_template:
        raise InvalidRequestError("--engine: the model has no chat template; give --prompt-tokens", param="engine")
    return tokenizer


def chat_token_ids(tokenizer: "Tokenizer", prompt: BenchPrompt) -> tuple[int, ...]:
    """A prompt of messages as the model reads it."""
    text = tokenizer.render_chat(list(prompt.messages))
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def device_name(device: str) -> str:
    """For people: the card, or the processor."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def versions(device: str) -> dict[str, str | int]:
    """What computes: the releases below us, and the threads on a CPU."""
    import torch

    found: dict[str, str | int] = {"torch": torch.__version__}
    if device == "cuda":
        return found | {"cuda": str(torch.version.cuda)}
    return found | {"threads": torch.get_num_threads()}
