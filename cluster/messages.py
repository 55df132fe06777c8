"""What an engine replica and a gateway say to each other, as plain data that pickles. Tokens travel as request.TokenEvent."""

from dataclasses import dataclass

from espalier.replicas.errors import EngineError
from espalier.replicas.report import Load
from espalier.replicas.request import TokenEvent
from espalier.replicas.shard_info import ShardInfo
from espalier.replicas.stats import EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDescription:
    """What a replica is, told once, before its first report.

    info: facts of the loaded model; None when it could not be loaded. failure: why this replica may not serve (a checkpoint that is refused,
    weights whose output is not the recorded one); None when it may. num_replicas: how many of its kind its configuration asks for.
    """

    info: ShardInfo | None
    failure: EngineError | None
    num_replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """One message of a replica's stream to one gateway: once a round, and as a heartbeat when there are none.

    load: of the whole engine, all gateways together. events: those of this gateway's requests since the last report, in order.
    stats: the engine's counts, now and then.
    """

    load: Load
    events: tuple[TokenEvent, ...] = ()
    stats: EngineStats | None = None
