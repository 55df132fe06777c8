"""What is looked at before anything starts: the options, and of every model its headers, its limits and its tokenizer. Reads no weights."""

import math
import os
from collections.abc import Mapping, Sequence

import torch

from espalier.cluster.config import ClusterConfig, ServedModel
from espalier.cluster.ingress.auth import KeyFileError, check_key_file
from espalier.cluster.settings import blamed_on, compose
from espalier.cluster.tracing import require_opentelemetry
from espalier.deploy.config import advice, resolve
from espalier.deploy.locate import locate_model
from espalier.replicas.cache.host_memory import available_memory_bytes, plan_host_slots
from espalier.replicas.cache.storage import kv_bytes_per_token
from espalier.replicas.config import resolved
from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.model.checkpoint import open_checkpoint
from espalier.replicas.tokenizer import Tokenizer


def checked_config(flags: Mapping[str, str], config_file: str | None) -> tuple[ClusterConfig, list[str]]:
    """The configuration, with every model found (fetched or made where need be) and looked at; and what the user should know of it.

    Raises InvalidRequestError and CheckpointError for what can never start, DownloadError for what may start later.
    """
    settings = resolve(flags, os.environ, config_file=config_file)
    gpus = count_gpus()
    config = compose(settings, locate_model, num_gpus=gpus)
    if (key_file := config.gateway.api_key_file) is not None:
        try:
            check_key_file(key_file)
        except (OSError, KeyFileError) as error:
            raise InvalidRequestError(f"api_key_file: {key_file}: {error}", param="api_key_file") from error
    if config.tracing is not None:
        with blamed_on(settings.common):
            require_opentelemetry()
    wanted = gpus_wanted([(model.num_gpus, model.num_replicas) for model in config.models], gpus)
    if wanted > gpus:
        # Ray would wait for them.
        raise InvalidRequestError(f"gpus: all replicas ask for {wanted:g}, and this machine has {gpus}", param="gpus")
    host_gb = sum(model.engine.host_kv_gb * model.num_replicas for model in config.models)
    if host_gb and host_gb > (available_gb := available_memory_bytes() / 2**30):
        message = f"host_kv_gb: all replicas ask for {host_gb:g} GiB, and this machine has {available_gb:.2f} available"
        raise InvalidRequestError(message, param="host_kv_gb")
    for model, layer in zip(config.models, settings.models, strict=True):
        with blamed_on(layer):
            check_model(model)
    return config, advice(config)


def count_gpus() -> int:
    """Of this machine, as far as CUDA shows them to this process."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_model(model: ServedModel) -> None:
    """Raises CheckpointError naming file and tensor, or InvalidRequestError when the options ask for more than the model has."""
    checkpoint = open_checkpoint(model.engine.model_path)
    context, limit = model.engine.max_context, checkpoint.config.max_positions
    if context is not None and context > limit:
        raise InvalidRequestError(
            f"context: {model.name} has positions for {limit} tokens, not {context}", param="context"
        )
    engine = resolved(model.engine)
    plan_host_slots(engine, engine.block_size * kv_bytes_per_token(checkpoint.config, engine.kv_dtype))
    Tokenizer.from_folder(model.engine.model_path)


def gpus_wanted(asked: Sequence[tuple[float, int]], num_gpus: int) -> float:
    """GPUs that hold all replicas, or no more than their sum where that is over num_gpus already.

    asked: for each model what a replica asks for, whole GPUs or a share, which lies on one GPU; and how many replicas there are.
    """
    # No replica is looked at before: there may be any number of them.
    if (total := round(sum(amount * count for amount, count in asked), 4)) > num_gpus:
        return total
    replicas = (amount for amount, count in asked if amount > 0 for _ in range(count))
    filled: list[int] = []
    # The large ones first, each where it fits first. Ray counts in ten-thousandths.
    for share in sorted((round(amount * 10_000) for amount in replicas), reverse=True):
        place = next((i for i, taken in enumerate(filled) if taken + share <= 10_000), None)
        if place is None:
            filled += [min(share, 10_000)] * math.ceil(share / 10_000)
        else:
            filled[place] += share
    return len(filled)
