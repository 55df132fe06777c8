"""What `espalier render` writes for Serve, deployed to a Ray on this machine: two models behind one gateway answer as `espalier serve` does."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from openai import OpenAI

from espalier.deploy.cli import main
from espalier.replicas.token_hash import token_sha256
from tests.cluster.conftest import LiveCluster, wait_until
from tests.support.cluster_clients import Answer, Ask, Roads
from tests.support.serve_driver import ServeDriver, free_ports
from tests.support.tiny import make_tiny_checkpoint

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

START_S = 240.0
OTHER = "Other model"
SAMPLED = Ask(temperature=0.9, seed=11)


@dataclass(frozen=True)
class Deployed:
    """driver: Serve's process. file: the rendered Serve config. The gateway's ports."""

    driver: ServeDriver
    file: Path
    http_port: int
    grpc_port: int

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def readiness(self) -> tuple[int, dict[str, Any]]:
        """Status and body of /ready; status 0 while nobody listens."""
        try:
            answer = httpx.get(f"{self.http_url}/ready", timeout=10)
        except httpx.TransportError:
            return 0, {}
        return answer.status_code, answer.json()

    def is_ready(self) -> bool:
        """Whether all models can be used; an application that cannot start fails the test."""
        status = self.driver.status()
        assert not any(told.startswith("DEPLOY_FAILED") for told in status.values()), status
        return self.readiness()[0] == 200

    def replicas(self) -> dict[str, set[str]]:
        """Ids of the replicas of each model."""
        return {model: set(entry["replicas"]) for model, entry in self.readiness()[1]["models"].items()}


@pytest.fixture(scope="module")
def deployed(cluster: LiveCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """The session cluster's model and another one, as its configuration file, rendered and deployed."""
    folder = tmp_path_factory.mktemp("serve-config")
    other = make_tiny_checkpoint(folder / "other", architecture="qwen3", seed=1)
    http_port, grpc_port = free_ports(2)
    content = {
        "replicas": 1,
        "context": 512,
        "kv_tokens": 4096,
        "max_lanes": 4,
        "batch_tokens": 32,
        "http_port": http_port,
        "grpc_port": grpc_port,
        "drain_timeout": 2,
        "models": [{"model": str(cluster.checkpoint), "name": cluster.model}, {"model": str(other), "name": OTHER}],
    }
    (folder / "serve.yaml").write_text(yaml.safe_dump(content))
    assert main(["render", str(folder / "serve.yaml"), "--out", str(folder)]) == 0
    rendered = yaml.safe_load((folder / "serve-config.yaml").read_text())
    names = [application["name"] for application in rendered["applications"]]
    with ServeDriver(names, num_cpus=4) as driver:
        found = Deployed(driver, folder / "serve-config.yaml", http_port, grpc_port)
        driver.deploy(found.file)
        wait_until(found.is_ready, "the rendered cluster is ready", timeout_s=START_S)
        yield found
        assert driver.stopped()
        assert found.readiness()[0] == 0


def ask_all(http_url: str, grpc_address: str, model: str, ask: Ask) -> list[Answer]:
    """The answers over each road."""

    async def run() -> list[Answer]:
        async with Roads(http_url, grpc_address, model) as roads:
            return [await road(ask) for road in (roads.http_whole, roads.http_streamed, roads.grpc_streamed)]

    return asyncio.run(run())


@pytest.mark.parametrize("ask", [Ask(), SAMPLED], ids=["greedy", "seeded"])
def test_its_tokens_are_those_of_the_cluster_that_espalier_started(
    cluster: LiveCluster, deployed: Deployed, ask: Ask
) -> None:
    expected = ask_all(cluster.http_url, cluster.grpc_address, cluster.model, ask)[0]
    answers = ask_all(deployed.http_url, deployed.grpc_address, cluster.model, ask)
    assert all(answer.whole for answer in (expected, *answers)), answers
    assert {answer.sha256 for answer in answers} == {expected.sha256}


def test_one_gateway_routes_by_model(cluster: LiveCluster, deployed: Deployed) -> None:
    client = OpenAI(base_url=f"{deployed.http_url}/v1", api_key="none", max_retries=0)
    assert {model.id for model in client.models.list()} == {cluster.model, OTHER}
    hashes = {}
    for model in (cluster.model, OTHER):
        answers = ask_all(deployed.http_url, deployed.grpc_address, model, Ask())
        assert all(answer.whole for answer in answers), answers
        assert {answer.replica for answer in answers} == deployed.replicas()[model]
        [hashes[model]] = {answer.sha256 for answer in answers}
    assert hashes[cluster.model] != hashes[OTHER]
    reply = client.completions.create(
        model=OTHER, prompt="Once", max_tokens=4, seed=3, extra_body={"return_token_ids": True}
    )
    choice = reply.choices[0].model_dump()
    assert token_sha256(choice["token_ids"]) == choice["espalier"]["token_sha256"]


def test_both_wires_tell_that_it_is_well(deployed: Deployed) -> None:
    assert httpx.get(f"{deployed.http_url}/health").status_code == 200
    with grpc.insecure_channel(deployed.grpc_address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert set(deployed.driver.status().values()) == {"RUNNING"}


def test_a_change_of_the_gateway_leaves_the_engines_alone(deployed: Deployed, tmp_path: Path) -> None:
    """The new gateway listens where the old one did, and finds the replicas that were there before."""
    before = deployed.replicas()
    content = yaml.safe_load(deployed.file.read_text())
    content["applications"][-1]["args"] |= {"max_outstanding": 1}
    (tmp_path / "changed.yaml").write_text(yaml.safe_dump(content))
    deployed.driver.deploy(tmp_path / "changed.yaml")

    def changed() -> bool:
        if not deployed.is_ready():
            return False
        body = {"model": OTHER, "prompt": "Once", "n": 2, "max_tokens": 1, "seed": 1}
        try:
            answer = httpx.post(f"{deployed.http_url}/v1/completions", json=body, timeout=30)
        except httpx.TransportError:
            return False  # between two gateways nobody listens
        return "at most 1 choices" in answer.text

    wait_until(changed, "the gateway takes one choice at a time", timeout_s=START_S)
    assert deployed.replicas() == before


def test_an_option_that_is_unknown_is_told_with_its_name(deployed: Deployed, tmp_path: Path) -> None:
    content = yaml.safe_load(deployed.file.read_text())
    content["applications"][0]["args"]["max_lane"] = 3
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(content))
    deployed.driver.deploy(tmp_path / "wrong.yaml")
    name = content["applications"][0]["name"]
    wait_until(lambda: deployed.driver.status()[name].startswith("DEPLOY_FAILED"), "it is refused", timeout_s=START_S)
    assert "args.max_lane: unknown key (did you mean max_lanes?)" in deployed.driver.status()[name]
