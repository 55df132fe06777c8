"""Puts an engine together in a replica's process: shard, group, tokenizer, loop, and the check that the weights still compute what they did."""

from espalier.cluster.config import ServedModel
from espalier.cluster.replica import ReplicaEngine
from espalier.replicas.shard_info import ShardInfo


def load_engine(model: ServedModel) -> tuple[ReplicaEngine, ShardInfo]:
    """Load the model; a replica.LoadEngine. Raises CheckpointError naming file and tensor, or telling that the weights are not what they were."""
    # Here and not above: the driver and the gateway import this module and have no use for torch.
    from espalier.replicas.engine import Engine
    from espalier.replicas.group import LocalShardGroup
    from espalier.replicas.model.canary import check_canary
    from espalier.replicas.shard import Shard
    from espalier.replicas.tokenizer import Tokenizer

    text = Tokenizer.from_folder(model.engine.model_path)
    shard = Shard(model.engine)
    check_canary(shard, model.engine.cache_dir)
    return Engine(model.engine, LocalShardGroup(shard), text), shard.info
