"""What start_cluster refuses before it starts anything."""

from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from espalier.cluster.config import ClusterConfig, GatewayConfig, ServedModel
from espalier.replicas.config import EngineConfig
from espalier.replicas.errors import InvalidRequestError
from tests.cluster.conftest import LiveCluster

pytestmark = pytest.mark.cluster


def test_a_port_that_is_taken_is_named(cluster: LiveCluster) -> None:
    from espalier.cluster.app import start_cluster

    model = ServedModel(name="tiny", engine=EngineConfig(model_path=cluster.checkpoint))
    config = ClusterConfig(models=(model,), gateway=GatewayConfig(http_port=0, grpc_port=0))
    http_port = urlsplit(cluster.http_url).port
    grpc_port = int(cluster.grpc_address.rsplit(":", 1)[1])
    assert http_port is not None
    with pytest.raises(InvalidRequestError, match=f"http_port: port {http_port}"):
        start_cluster(replace(config, gateway=replace(config.gateway, http_port=http_port)))
    with pytest.raises(InvalidRequestError, match=f"grpc_port: port {grpc_port}"):
        start_cluster(replace(config, gateway=replace(config.gateway, grpc_port=grpc_port)))
