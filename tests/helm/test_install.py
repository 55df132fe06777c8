"""Helm 4 installs, upgrades, fails to upgrade, rolls back and uninstalls the chart, against the stand-in for an API server (see its docstring)."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.support.kube.api_server import ApiStore, serve_api
from tests.support.kube.chart import CHART, EXAMPLES, is_hook, overlaid, rendered, values_of
from tests.support.kube.objects import check_object
from tests.support.kube.release import label
from tests.support.tools import require_module

pytestmark = pytest.mark.deploy
NAME, NAMESPACE = "rel", "llm"
KUBECONFIG = "apiVersion: v1\nkind: Config\n"
# A Service with two ports of one number: sound YAML that the server refuses.
REFUSED = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "twice"},
    "spec": {"ports": [{"name": "a", "port": 1}, {"name": "b", "port": 1}]},
}


@pytest.fixture
def cluster() -> Iterator[tuple[Any, ApiStore]]:
    """(Helm's configuration, the store behind it)."""
    helm = require_module("helm_python")
    with serve_api(partial(check_object, kube_version="1.37"), kube_version="1.37") as (url, store):
        config = helm.Config(kube_apiserver=url, namespace=NAMESPACE, kubeconfig_content=KUBECONFIG)
        with config:
            yield config, store


def kept(store: ApiStore) -> set[str]:
    """Everything in the store but Helm's own records, which are Secrets; the chart has none."""
    return {f"{kind}/{name}" for kind in store.kinds() - {"Secret"} for name in store.names(kind)}


def statuses(config: Any) -> list[tuple[int, str]]:
    return [(entry["revision"], entry["status"]) for entry in config.history(NAME)]


def image(store: ApiStore) -> str:
    (name,) = store.names("RayService")
    head = store.find("RayService", name)["spec"]["rayClusterConfig"]["headGroupSpec"]
    text: str = head["template"]["spec"]["containers"][0]["image"]
    return text


def test_a_release_from_install_to_uninstall(cluster: tuple[Any, ApiStore]) -> None:
    config, store = cluster
    values = values_of("everything") | {"image": {"tag": "1.0.0"}}
    release = config.install(CHART, NAME, values)
    assert release["status"] == "deployed"
    assert kept(store) == {label(manifest) for manifest in rendered("everything").manifests if not is_hook(manifest)}
    assert image(store).endswith(":1.0.0")

    config.upgrade(CHART, NAME, values | {"image": {"tag": "1.0.1"}, "podDisruptionBudget": {"enabled": False}})
    assert image(store).endswith(":1.0.1")
    assert store.names("PodDisruptionBudget") == set()

    helm = require_module("helm_python")
    broken = values | {"image": {"tag": "1.0.2"}, "extraObjects": [REFUSED]}
    with pytest.raises(helm.HelmReleaseError, match=r'Service "twice" is invalid: spec/ports: port .* is there twice'):
        config.upgrade(CHART, NAME, broken)
    assert statuses(config) == [(1, "superseded"), (2, "deployed"), (3, "failed")]

    config.rollback(NAME, version=1)
    assert image(store).endswith(":1.0.0")
    assert store.names("PodDisruptionBudget")
    assert statuses(config)[-1] == (4, "deployed")

    config.uninstall(NAME)
    # The claim with downloaded models outlives its release, by helm.sh/resource-policy.
    assert {entry.partition("/")[0] for entry in kept(store)} == {"PersistentVolumeClaim"}
    assert store.names("Secret") == set()
    # And the next release of that name takes it over.
    assert config.install(CHART, NAME, values)["status"] == "deployed"


def test_upgrades_from_shape_to_shape_leave_nothing_behind(cluster: tuple[Any, ApiStore]) -> None:
    config, store = cluster
    shapes = ["everything", *EXAMPLES, "minimal"]
    config.install(CHART, NAME, values_of("minimal"))
    for name in shapes:
        config.upgrade(CHART, NAME, values_of(name))
        wanted = {label(manifest) for manifest in rendered(name).manifests if not is_hook(manifest)}
        # But for the claim with downloaded models, which is kept.
        assert kept(store) - {"PersistentVolumeClaim/rel-espalier-models"} == wanted - {
            "PersistentVolumeClaim/rel-espalier-models"
        }, name


@pytest.mark.parametrize("name", ["minimal", *EXAMPLES])
def test_every_example_installs(cluster: tuple[Any, ApiStore], name: str) -> None:
    config, store = cluster
    assert config.install(CHART, NAME, values_of(name))["status"] == "deployed"
    assert len(store.names("RayService")) == 1


def test_what_the_server_refuses_is_no_release(cluster: tuple[Any, ApiStore]) -> None:
    config, _ = cluster
    helm = require_module("helm_python")
    with pytest.raises(helm.HelmReleaseError, match='Service "twice" is invalid'):
        config.install(CHART, NAME, overlaid(values_of("minimal"), {"extraObjects": [REFUSED]}))
    assert statuses(config) == [(1, "failed")]


def test_a_dry_run_writes_nothing(cluster: tuple[Any, ApiStore]) -> None:
    config, store = cluster
    config.install(CHART, NAME, values_of("minimal"), dry_run="server")
    assert kept(store) == set()
    assert store.names("Secret") == set()
