"""The stand-in for an API server, spoken to in plain HTTP. It is no API server: see its docstring for what it cannot show."""

import base64
import json
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.support.kube.api_server import ApiStore, serve_api
from tests.support.kube.api_wire import MAGIC, decode_object
from tests.support.kube.rules import check_rules
from tests.support.kube.samples import DEPLOYMENT, SERVICE, changed, sound

SERVICES = "/api/v1/namespaces/llm/services"
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"


@pytest.fixture
def api() -> Iterator[tuple[str, ApiStore]]:
    with serve_api(check_rules, kube_version="1.37") as running:
        yield running


def call(url: str, method: str = "GET", body: Any = None, content_type: str = "application/json") -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(url, data, {"Content-Type": content_type}, method=method), timeout=10) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, json.load(error)


def test_discovery(api: tuple[str, ApiStore]) -> None:
    url, _ = api
    assert call(f"{url}/version")[1]["gitVersion"] == "v1.37.0"
    groups = {group["name"] for group in call(f"{url}/apis")[1]["groups"]}
    assert {"apps", "ray.io", "monitoring.coreos.com", "gateway.networking.k8s.io"} <= groups
    kinds = {entry["name"]: entry["kind"] for entry in call(f"{url}/apis/ray.io/v1")[1]["resources"]}
    assert kinds["rayservices"] == "RayService"
    assert {entry["name"] for entry in call(f"{url}/apis/networking.k8s.io/v1")[1]["resources"]} == {
        *("ingresses", "networkpolicies"),
    }
    paths = call(f"{url}/openapi/v3/apis/ray.io/v1")[1]["paths"]
    names = [
        entry["name"]
        for entry in paths["/apis/ray.io/v1/namespaces/{namespace}/rayservices/{name}"]["patch"]["parameters"]
    ]
    assert {"dryRun", "fieldValidation"} <= set(names)
    assert call(f"{url}/apis/no.such/v1")[0] == 404


def test_create_get_list_replace_delete(api: tuple[str, ApiStore]) -> None:
    url, store = api
    assert call(url + SERVICES, "POST", sound(SERVICE))[0] == 201
    assert call(url + SERVICES, "POST", sound(SERVICE))[0] == 409
    kept = call(f"{url}{SERVICES}/web")[1]
    assert kept["metadata"]["namespace"] == "llm"
    assert [len(call(f"{url}{SERVICES}?labelSelector=app%3D{app}")[1]["items"]) for app in ("web", "x")] == [1, 0]
    assert len(call(f"{url}/api/v1/services")[1]["items"]) == 1
    replaced = call(f"{url}{SERVICES}/web", "PUT", changed(sound(SERVICE), "spec/ports/0/port", 8080))[1]
    assert replaced["metadata"]["uid"] == kept["metadata"]["uid"]
    assert replaced["metadata"]["resourceVersion"] != kept["metadata"]["resourceVersion"]
    assert call(f"{url}{SERVICES}/web", "DELETE")[0] == 200
    assert call(f"{url}{SERVICES}/web")[0] == 404
    assert store.names("Service") == set()


def test_patches(api: tuple[str, ApiStore]) -> None:
    url, store = api
    path = f"{url}{SERVICES}/web"
    assert call(path, "PATCH", {"metadata": {"labels": {"a": "b"}}}, MERGE)[0] == 404
    assert call(path, "PATCH", sound(SERVICE), APPLY)[0] == 200
    assert call(path, "PATCH", {"metadata": {"labels": {"a": "b", "app": None}}}, MERGE)[0] == 200
    assert store.find("Service", "web")["metadata"]["labels"] == {"a": "b"}
    call(path, "PATCH", sound(SERVICE), APPLY)
    assert store.find("Service", "web")["metadata"]["labels"] == {"app": "web"}


def test_a_dry_run_changes_nothing_and_checks_all(api: tuple[str, ApiStore]) -> None:
    url, store = api
    assert call(f"{url}{SERVICES}?dryRun=All", "POST", sound(SERVICE))[0] == 201
    assert call(f"{url}{SERVICES}?dryRun=All", "POST", changed(sound(SERVICE), "spec/ports/0/name", "grpc"))[0] == 422
    assert store.names("Service") == set()


def test_what_the_check_refuses_is_not_kept(api: tuple[str, ApiStore]) -> None:
    url, store = api
    bad = changed(sound(DEPLOYMENT), "spec/template/spec/containers/0/volumeMounts/0/name", "date")
    code, status = call(f"{url}/apis/apps/v1/namespaces/llm/deployments", "POST", bad)
    assert (code, status["reason"]) == (422, "Invalid")
    assert status["message"].startswith('Deployment "web" is invalid: spec/template/spec/containers/0/volumeMounts/0: ')
    assert status["details"]["causes"][0]["field"] == "spec/template/spec/containers/0/volumeMounts/0"
    assert store.names("Deployment") == set()


def test_a_watch_is_refused_so_that_clients_ask_again(api: tuple[str, ApiStore]) -> None:
    assert call(f"{api[0]}{SERVICES}?watch=true")[0] == 400


def field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2, len(value)]) + value


@pytest.mark.parametrize(
    ("kind", "data", "extra"),
    [("Secret", base64.b64encode(b"v").decode(), {"type": "Opaque"}), ("ConfigMap", "v", {})],
)
def test_objects_in_protobuf(kind: str, data: str, extra: dict[str, str]) -> None:
    labels = field(11, field(1, b"owner") + field(2, b"helm"))
    metadata = field(1, b"rel") + field(3, b"llm") + bytes([7 << 3, 5]) + labels
    body = field(1, metadata) + field(2, field(1, b"k") + field(2, b"v"))
    body += field(3, b"Opaque") if kind == "Secret" else b""
    envelope = field(1, field(1, b"v1") + field(2, kind.encode())) + field(2, body)
    assert decode_object(MAGIC + envelope) == {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {"name": "rel", "namespace": "llm", "labels": {"owner": "helm"}},
        "data": {"k": data},
        **extra,
    }


def test_other_kinds_in_protobuf_are_refused() -> None:
    with pytest.raises(ValueError, match="Pod in protobuf"):
        decode_object(MAGIC + field(1, field(1, b"v1") + field(2, b"Pod")) + field(2, b""))
