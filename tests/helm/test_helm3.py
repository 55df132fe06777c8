"""The chart in Helm 3: the same objects as in Helm 4, and the Kubernetes versions of Chart.yaml enforced, which rendering in Helm 4 does not do."""

import pytest

from tests.support.kube.chart import CHART, is_hook, rendered, values_of
from tests.support.kube.helm import RenderRefusedError
from tests.support.kube.helm3 import render_helm3
from tests.support.kube.release import label

pytestmark = pytest.mark.deploy


def test_helm_3_renders_the_same_objects() -> None:
    ours = {label(manifest): manifest for manifest in rendered("everything").manifests if not is_hook(manifest)}
    theirs = {
        label(manifest): manifest for manifest in render_helm3(CHART, values_of("everything")) if not is_hook(manifest)
    }
    assert theirs == ours


def test_an_old_kubernetes_is_refused() -> None:
    with pytest.raises(RenderRefusedError, match="chart requires kubeVersion"):
        render_helm3(CHART, values_of("everything"), kube_version="1.20")


def test_a_typo_is_refused() -> None:
    with pytest.raises(RenderRefusedError, match="imag"):
        render_helm3(CHART, {**values_of("everything"), "imag": {}})
