"""How the cluster's processes log: text or JSON lines, to one file each that the starting process can follow. Never holds prompt or reply text."""

import json
import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from espalier.cluster.live_call import LiveCall
from espalier.cluster.origin import ORIGIN

ROOT = "espalier"
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

log = logging.getLogger(__name__)


def _extra(record: logging.LogRecord) -> dict[str, object]:
    # Ray marks every record with a private field.
    return {key: value for key, value in vars(record).items() if key not in _STANDARD and not key.startswith("_")}


def _origin() -> dict[str, str]:
    origin = ORIGIN.get()
    if origin is None:
        return {}
    trace = {} if origin.trace is None else {"trace_id": origin.trace.trace_id}
    return {"request_id": origin.request_id, **trace}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ts (seconds since the epoch), level, logger, event, request_id and trace_id of the request that the work is
    done for, and whatever the call passed in `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields: dict[str, object] = {
            "ts": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **_origin(),
            **_extra(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class TextFormatter(logging.Formatter):
    """The same for people: time, level, event, then `key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        pairs = "".join(f" {key}={value}" for key, value in _extra(record).items() if value is not None)
        line = f"{clock} {record.levelname.lower():7} {record.getMessage()}{pairs}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


@dataclass(frozen=True, slots=True)
class LogConfig:
    """level: debug, info, warning or error. folder: where each process writes a file of its own; None writes to stderr."""

    level: str = "info"
    as_json: bool = False
    folder: Path | None = None


def configure_logging(config: LogConfig, process: str) -> None:
    """Send what Espalier logs in this process to `<folder>/<process>.log`, or to stderr. Leaves other libraries' logging alone."""
    handler: logging.Handler
    if config.folder is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        config.folder.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(config.folder / f"{process}.log", encoding="utf-8")
    handler.setFormatter(JsonFormatter() if config.as_json else TextFormatter())
    logger = logging.getLogger(ROOT)
    logger.handlers = [handler]
    logger.setLevel(config.level.upper())
    logger.propagate = False


def log_request(live: LiveCall, now: float) -> None:
    """The one line of an ended call. Call it before the choices that a leaving client left behind are marked finished."""
    call, choices = live.call, live.choices
    finishes = [choice.finish for choice in choices if choice.finish is not None]
    ttft_s = live.time_to_first_token_s
    log.info(
        "request",
        extra={
            "call_id": call.call_id,
            "model": call.model,
            "client": call.client,
            "outcome": live.outcome,
            "choices": call.n,
            "finish_reasons": ",".join(finish.reason.value for finish in finishes),
            "prompt_tokens": len(call.prompt_token_ids),
            "cached_tokens": sum(finish.usage.cached_tokens for finish in finishes),
            "completion_tokens": sum(len(choice.emitted) for choice in choices),
            "replicas": ",".join(choice.replica.replica_id for choice in choices if choice.replica is not None),
            "replays": live.replays,
            "ttft_s": None if ttft_s is None else round(ttft_s, 4),
            "seconds": round(now - choices[0].started_at, 4),
        },
    )


class LogFollower:
    """Copies whole lines appended to the files of a folder, new files included, to a stream."""

    def __init__(self, folder: Path, out: TextIO) -> None:
        self._folder = folder
        self._out = out
        self._read: dict[Path, int] = {}

    def copy_new_lines(self) -> None:
        """Copy what has been appended since the last call."""
        for path in sorted(self._folder.glob("*.log")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            self._out.write(whole.decode(errors="replace"))
        self._out.flush()
