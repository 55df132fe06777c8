"""The options of a cluster, each declared once. A row gives a flag (`--max-lanes`), an environment variable (`ESPALIER_MAX_LANES`) and a key of
the configuration file and of a Serve config's `args` (`max_lanes`), and names the config field that it fills; defaults are those of the config
classes.

Knows how one value is read. Which of several values counts, and what a whole set of them makes, is the business of others.
"""

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from espalier.cluster.config import ClusterConfig, GatewayConfig, RouterConfig, ServedModel
from espalier.replicas.config import EngineConfig

Scope = Literal["model", "engine", "gateway", "router", "cluster"]
OWNERS = {
    "model": ServedModel,
    "engine": EngineConfig,
    "gateway": GatewayConfig,
    "router": RouterConfig,
    "cluster": ClusterConfig,
}
# Options of these may differ between the models of one file.
PER_MODEL: tuple[Scope, ...] = ("model", "engine")


@dataclass(frozen=True, slots=True)
class Kind:
    """How a value is read. noun: what it must be, for the message. types: Python types that a YAML value may have.

    convert: from text, or from a YAML value of these types, to the value; raises ValueError.
    """

    noun: str
    metavar: str
    types: tuple[type, ...]
    convert: Callable[[Any], Any]


def _switch(value: str | bool) -> bool:
    if isinstance(value, bool):
        return value
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if value.lower() not in words:
        raise ValueError(value)
    return words[value.lower()]


def _text(value: str) -> str:
    if not value.strip():
        raise ValueError(value)
    return value


def _path(value: str) -> Path:
    return Path(_text(value))


def _one_of(*choices: str) -> Kind:
    def convert(value: str) -> str:
        if value not in choices:
            raise ValueError(value)
        return value

    return Kind(f"one of {', '.join(choices)}", "|".join(choices), (str,), convert)


def _finite(value: str | int | float) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


INTEGER = Kind("a whole number", "N", (int,), int)
NUMBER = Kind("a number", "X", (int, float), _finite)
SECONDS = Kind("a number of seconds", "SECONDS", (int, float), _finite)
TEXT = Kind("some text", "TEXT", (str,), _text)
MODEL = Kind("a folder or a hub id", "PATH|HUB_ID", (str,), _text)
PATH = Kind("a path", "PATH", (str,), _path)
SWITCH = Kind("true or false", "", (bool,), _switch)


@dataclass(frozen=True, slots=True)
class Option:
    """One setting. name: its key; flag and variable follow from it. scope, field: the config class and the field that it fills.

    unset: what stands for the class's default here, where deploy resolves the value before the class sees it.
    """

    name: str
    scope: Scope
    field: str
    kind: Kind
    help: str
    unset: str | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "ESPALIER_" + self.name.upper()

    @property
    def default(self) -> object:
        """What holds when nobody sets it; None where that depends on the model or the machine."""
        return self.unset or next(_default(f) for f in fields(OWNERS[self.scope]) if f.name == self.field)

    def from_text(self, text: str) -> Any:
        """Value of a flag or a variable; raises ValueError with a sentence."""
        try:
            return self.kind.convert(text)
        except ValueError:
            raise ValueError(f"must be {self.kind.noun}, not {text!r}") from None

    def from_yaml(self, value: object) -> Any:
        """Value of a key in the file; raises ValueError with a sentence. Types count: `true` is no number and 1 is no text."""
        if type(value) not in self.kind.types:
            raise ValueError(f"must be {self.kind.noun}, not {value!r}")
        try:
            return self.kind.convert(value)
        except ValueError:
            raise ValueError(f"must be {self.kind.noun}, not {value!r}") from None


def _default(field: "Field[Any]") -> object:
    value = field.default if field.default_factory is MISSING else field.default_factory()
    return None if value is MISSING else value


OPTIONS: tuple[Option, ...] = (
    Option("model", "engine", "model_path", MODEL, "folder of an EXL3 checkpoint, or a hub id org/name[@revision]"),
    Option("name", "model", "name", TEXT, "what clients put in `model` (default: the folder's name)"),
    Option("replicas", "model", "num_replicas", INTEGER, "copies of the model; on this machine's GPUs one on each"),
    Option("cpus", "model", "num_cpus", NUMBER, "CPUs that each replica asks of Ray"),
    Option("gpus", "model", "num_gpus", NUMBER, "GPUs that each replica asks of Ray; on GPUs 1 unless told"),
    Option(
        "device",
        "engine",
        "device",
        _one_of("auto", "cpu", "cuda"),
        "where replicas run; auto: on GPUs if there are any",
        unset="auto",
    ),
    Option("context", "engine", "max_context", INTEGER, "tokens of prompt and reply together (default: the model's)"),
    Option(
        "kv_dtype",
        "engine",
        "kv_dtype",
        _one_of("fp32", "fp16", "bf16"),
        "how keys and values are kept (default: fp32; GPU: fp16)",
    ),
    Option(
        "kv_tokens",
        "engine",
        "kv_tokens",
        INTEGER,
        "tokens that a replica's KV cache holds (default: all lanes'; GPU: what fits)",
    ),
    Option("block_size", "engine", "block_size", INTEGER, "tokens in a KV block: 16, 32, 64 or 128"),
    Option("prefix_cache", "engine", "prefix_cache", SWITCH, "keep computed blocks for later requests"),
    Option(
        "host_kv_gb", "engine", "host_kv_gb", NUMBER, "GiB of host memory for blocks that the cache has no room for"
    ),
    Option("max_lanes", "engine", "max_lanes", INTEGER, "sequences in one round of a replica (default: 16; GPU: 64)"),
    Option(
        "batch_tokens", "engine", "batch_tokens", INTEGER, "rows in one round of a replica (default: 256; GPU: 4096)"
    ),
    Option(
        "tracks",
        "engine",
        "tracks",
        INTEGER,
        "1: prompts and decoding in the same rounds; 2: side by side in their own",
    ),
    Option(
        "decode_gap_ms",
        "engine",
        "decode_gap_ms",
        NUMBER,
        "GPU: beside decoding lanes, prompts may stretch a round to this",
    ),
    Option(
        "memory_share",
        "engine",
        "memory_share",
        NUMBER,
        "GPU: how much of its memory a replica may fill, up to 1 (default: 0.9 of its part)",
    ),
    Option("cuda_graphs", "engine", "cuda_graphs", SWITCH, "GPU: capture rounds at load and replay them"),
    Option("nvtx", "engine", "nvtx", SWITCH, "GPU: mark what the host does in a round as NVTX ranges"),
    Option("max_waiting", "engine", "max_waiting", INTEGER, "requests that may wait at a replica; more get 429"),
    Option("cpu_threads", "engine", "cpu_threads", INTEGER, "threads of a replica (default: the cores, shared)"),
    Option("progress_timeout", "engine", "progress_timeout_s", SECONDS, "without a finished round: not healthy"),
    Option("cache_dir", "engine", "cache_dir", PATH, "decoded weights, the default model, records of first loads"),
    Option("host", "gateway", "host", TEXT, "address to listen on, HTTP and gRPC"),
    Option("http_port", "gateway", "http_port", INTEGER, "port of HTTP; 0 takes a free one"),
    Option("grpc_port", "gateway", "grpc_port", INTEGER, "port of gRPC; 0 takes a free one"),
    Option("api_key_file", "gateway", "api_key_file", PATH, "`label: key` a line, mode 0600; reloaded when it changes"),
    Option("metrics_open", "gateway", "metrics_open", SWITCH, "/metrics needs no key"),
    Option("max_outstanding", "gateway", "max_outstanding", INTEGER, "requests under way at the gateway; more get 429"),
    Option("keepalive", "gateway", "keepalive_s", SECONDS, "between SSE comments before the first token"),
    Option("deadline", "gateway", "default_deadline_s", SECONDS, "for requests that name none (default: no limit)"),
    Option("drain_timeout", "gateway", "drain_timeout_s", SECONDS, "for running requests to finish at stop"),
    Option("reflection", "gateway", "reflection", SWITCH, "offer gRPC reflection"),
    Option("audit_share", "gateway", "audit_share", NUMBER, "share of replies run again and compared: 0 to 1"),
    Option("affinity_min_tokens", "router", "affinity_min_tokens", INTEGER, "shorter held prefixes attract nothing"),
    Option(
        "affinity_max_excess", "router", "affinity_max_excess", INTEGER, "outstanding tokens that outweigh a prefix"
    ),
    Option("prefix_entries", "router", "prefix_entries", INTEGER, "block hashes remembered for each replica"),
    Option("session_ttl", "router", "session_ttl_s", SECONDS, "how long an idle session keeps its replica"),
    Option("log_level", "cluster", "log_level", _one_of("debug", "info", "warning", "error"), "least level logged"),
    Option("log_json", "cluster", "log_json", SWITCH, "one JSON object a log line"),
    Option("trace_endpoint", "cluster", "trace_endpoint", TEXT, "OTLP/gRPC collector of spans, http://HOST:PORT"),
    Option("trace_ratio", "cluster", "trace_ratio", NUMBER, "share of traces sampled where the caller has not decided"),
)
BY_NAME = {option.name: option for option in OPTIONS}


def suggest(unknown: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` for the known word nearest to an unknown one, or nothing when none is near."""
    near = difflib.get_close_matches(unknown, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
