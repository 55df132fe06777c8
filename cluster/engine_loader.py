"""Puts an engine together in a replica's process: the shards of its device, tokenizer, loop."""

from espalier.cluster.config import ServedModel
from espalier.cluster.replica import ReplicaEngine
from espalier.replicas.shard_info import ShardInfo


def load_engine(model: ServedModel) -> tuple[ReplicaEngine, ShardInfo]:
    """Load the model; a replica.LoadEngine. Raises CheckpointError naming file and tensor, or telling that the weights are not what they were."""
    # Here and not above: the driver and the gateway import this module and have no use for torch.
    from espalier.replicas.engine import Engine
    from espalier.replicas.open import open_group
    from espalier.replicas.tokenizer import Tokenizer

    text = Tokenizer.from_folder(model.engine.model_path)
    group = open_group(model.engine)
    return Engine(model.engine, group, text), group.info
