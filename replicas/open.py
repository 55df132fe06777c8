"""Opens a model where its config says: picks the shards of the device, and imports no other's. Knows neither text nor the engine's loop."""

from espalier.replicas.config import EngineConfig
from espalier.replicas.group import ShardGroup


def open_group(config: EngineConfig) -> ShardGroup:
    """The loaded shards of one replica, checked to compute what they did at their first load.

    Raises CheckpointError naming file and tensor, InvalidRequestError naming an option, or EngineError.
    """
    if config.device == "cuda":
        from espalier.replicas.gpu.shard import load_gpu_group

        return load_gpu_group(config)
    from espalier.replicas.group import LocalShardGroup
    from espalier.replicas.model.canary import check_canary
    from espalier.replicas.shard import Shard

    shard = Shard(config)
    check_canary(shard, config.cache_dir)
    return LocalShardGroup(shard)
