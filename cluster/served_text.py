"""Loads what a gateway holds of a model: its tokenizer, and the sampling values that its checkpoint recommends."""

import json
import time
from pathlib import Path

from espalier.cluster.catalog import ServedText
from espalier.cluster.config import ServedModel
from espalier.replicas.errors import CheckpointError, EngineError
from espalier.replicas.tokenizer import Tokenizer

# Keys of generation_config.json that mean the same as our field of that name.
RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def load_text(model: ServedModel) -> ServedText:
    """Never raises EngineError: a checkpoint that is refused leaves a model that tells why it cannot be used."""
    created = int(time.time())
    folder = model.engine.model_path
    try:
        return ServedText(
            text=Tokenizer.from_folder(folder), failure=None, defaults=recommended_sampling(folder), created=created
        )
    except EngineError as error:
        return ServedText(text=None, failure=error, defaults={}, created=created)


def recommended_sampling(folder: Path) -> dict[str, float | int]:
    """Sampling values of the folder's generation_config.json, by SamplingParams field; none when there is no such file.

    Raises CheckpointError when it is not an object of numbers where numbers belong. `do_sample` is not looked at, as usual with servers.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold an object")
    values = {name: content[name] for name in RECOMMENDED if content.get(name) is not None}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{path}: {name} must be a number", param=name)
    return values
