"""From what `--model` says to the folder of a checkpoint: a folder, a model of the Hugging Face hub, or nothing, which is the default model.

The hub keeps downloads in a cache of its own; the default model is made once, in ours. Knows nothing of what is in a checkpoint.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from espalier.cluster.settings import LocatedModel
from espalier.replicas.errors import EngineError, InvalidRequestError

DEFAULT_MODEL_NAME = "smollm2-135m-instruct"
# What a checkpoint is served from; other formats of the same weights stay on the hub.
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")


class DownloadError(EngineError):
    """A model could not be fetched; trying again may help."""

    code = "download"


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub: `repo` is org/name; a branch, tag or commit as `revision`, or the main branch."""

    repo: str
    revision: str | None

    @property
    def name(self) -> str:
        return self.repo.partition("/")[2]


def parse_model(model: str) -> Path | HubModel:
    """A folder that exists wins over a hub id that looks the same. Raises InvalidRequestError when it can be neither."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise InvalidRequestError(f"model: {model} is a file; give the folder of a checkpoint", param="model")
    hub = hub_model(model)
    if hub is None:
        raise InvalidRequestError(f"model: there is no folder {model}, and it is no hub id org/name", param="model")
    return hub


def hub_model(model: str) -> HubModel | None:
    """What a hub id names; None when it is none."""
    match = _HUB_ID.fullmatch(model)
    return None if match is None else HubModel(match["repo"], match["revision"])


def locate_model(model: str | None, cache_dir: Path) -> LocatedModel:
    """Folder and name of the model, fetched or made first where need be. Raises InvalidRequestError and DownloadError."""
    if model is None:
        from espalier.deploy.default_model import ensure_default_model  # encodes: brings torch

        return LocatedModel(ensure_default_model(cache_dir), DEFAULT_MODEL_NAME)
    found = parse_model(model)
    if isinstance(found, Path):
        return LocatedModel(found, found.name)
    return LocatedModel(download(found), found.name)


def download(model: HubModel) -> Path:
    """The hub's snapshot of a model, from its cache when that is complete or the hub cannot be reached."""
    import huggingface_hub
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    label = model.repo if model.revision is None else f"{model.repo}@{model.revision}"
    try:
        folder = huggingface_hub.snapshot_download(model.repo, revision=model.revision, allow_patterns=list(HUB_FILES))
    except RevisionNotFoundError:
        raise InvalidRequestError(f"model: {model.repo} has no revision {model.revision}", param="model") from None
    except RepositoryNotFoundError:
        message = f"model: there is no folder {label}, and the hub has no such model, or it needs a login"
        raise InvalidRequestError(message, param="model") from None
    except LocalEntryNotFoundError:
        raise DownloadError(
            f"{label}: not in the hub's cache on this machine, and the hub cannot be reached; give the folder of a checkpoint instead",
            param="model",
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise DownloadError(f"{label}: the download failed: {error}", param="model") from None
    return Path(folder)
