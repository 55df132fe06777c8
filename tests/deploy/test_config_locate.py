"""What `--model` may say: a folder, a hub id, nothing. The hub is out of reach here, as it is on many machines."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from espalier.deploy import default_model, locate
from espalier.deploy.locate import DownloadError, HubModel, locate_model, parse_model
from espalier.replicas.errors import InvalidRequestError


def test_a_folder_is_served_under_its_own_name(tmp_path: Path) -> None:
    folder = tmp_path / "some-model"
    folder.mkdir()
    located = locate_model(str(folder), tmp_path)
    assert (located.path, located.name) == (folder, "some-model")


def test_without_a_model_it_is_the_default_one_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "ensure_default_model", lambda cache_dir: cache_dir / "made")
    located = locate_model(None, tmp_path)
    assert (located.path, located.name) == (tmp_path / "made", "smollm2-135m-instruct")


def test_a_folder_that_looks_like_a_hub_id_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_model("org/name") == tmp_path / "org" / "name"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/some-model", HubModel("org/some-model", None)),
        ("org/some.model_1@refs/pr/3", HubModel("org/some.model_1", "refs/pr/3")),
        ("org/model@4.0bpw", HubModel("org/model", "4.0bpw")),
    ],
)
def test_hub_ids(text: str, expected: HubModel) -> None:
    assert parse_model(text) == expected


@pytest.mark.parametrize("text", ["model", "./org/name", "/absent/folder", "org/name/part", "org/na me", "org/name@"])
def test_neither_folder_nor_hub_id(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequestError, match="model: there is no folder") as caught:
        locate_model(text, tmp_path)
    assert caught.value.param == "model"


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(InvalidRequestError, match="is a file"):
        locate_model(str(tmp_path / "model.gguf"), tmp_path)


def test_without_the_hub_the_error_says_what_helps(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="the hub cannot be reached; give the folder"):
        locate_model("org/surely-not-in-any-cache", tmp_path)


def test_the_hub_is_asked_for_the_revision_and_for_what_we_serve_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None, list[str]]] = []

    def snapshot(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repo, revision, allow_patterns))
        if repo == "org/absent":
            raise LocalEntryNotFoundError("absent")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    located = locate_model("org/model@v1", tmp_path)
    assert (located.path, located.name) == (tmp_path, "model")
    assert asked == [("org/model", "v1", list(locate.HUB_FILES))]
    with pytest.raises(DownloadError):
        locate_model("org/absent", tmp_path)
