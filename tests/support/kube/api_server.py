"""A stand-in for a Kubernetes API server, in memory and on loopback, that real Helm installs into. Every write passes a given check or gets 422.

It is not an API server: no admission, no defaults of built-in kinds, no controllers (a RayService stays an object, no pod ever runs), no
RBAC, no field managers (an apply replaces the object, as if one client owned all of it), no watch events. What only a cluster can show stays unshown.
"""

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml

from tests.support.kube.api_discovery import Resource, all_resources, describe
from tests.support.kube.api_wire import MAGIC, decode_object
from tests.support.kube.fault import Fault

Manifest = dict[str, Any]
Check = Callable[[Manifest], list[Fault]]
# (apiVersion, plural, namespace, name)
Key = tuple[str, str, str, str]
CREATED = "2026-01-01T00:00:00Z"
# What the server itself writes into metadata.
SERVERS_OWN = ("uid", "resourceVersion", "creationTimestamp", "generation", "managedFields", "selfLink")
MAX_CAUSES = 8
POLL_S = 0.02


class RefusedError(Exception):
    """An answer other than success."""

    def __init__(self, code: int, reason: str, message: str, faults: list[Fault] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.faults = faults or []

    def status(self) -> Manifest:
        causes = [
            {"field": fault.path, "message": fault.message, "reason": "FieldValueInvalid"} for fault in self.faults
        ]
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "code": self.code,
            "details": {"causes": causes},
        }


class ApiStore:
    """The objects, and what each verb does to them. Thread-safe by one lock."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._objects: dict[Key, Manifest] = {}
        self._version = 0
        self._lock = threading.RLock()

    def kinds(self) -> set[str]:
        """Kinds of which there is an object."""
        with self._lock:
            return {manifest["kind"] for manifest in self._objects.values()}

    def names(self, kind: str) -> set[str]:
        """Names of all objects of a kind, in every namespace."""
        with self._lock:
            return {key[3] for key, manifest in self._objects.items() if manifest["kind"] == kind}

    def find(self, kind: str, name: str) -> Manifest:
        with self._lock:
            (found,) = [kept for key, kept in self._objects.items() if kept["kind"] == kind and key[3] == name]
            return found

    def get(self, key: Key) -> Manifest:
        with self._lock:
            if key not in self._objects:
                raise RefusedError(404, "NotFound", f'{key[1]} "{key[3]}" not found')
            return self._objects[key]

    def listed(self, resource: Resource, namespace: str, selector: str) -> Manifest:
        wanted = dict(pair.replace("==", "=").split("=") for pair in selector.split(",") if "=" in pair)
        with self._lock:
            items = [
                manifest
                for key, manifest in sorted(self._objects.items())
                if key[:2] == (resource.api_version, resource.plural)
                and namespace in ("", key[2])
                and wanted.items() <= (manifest["metadata"].get("labels") or {}).items()
            ]
            metadata = {"resourceVersion": str(self._version)}
        return {
            "kind": f"{resource.kind}List",
            "apiVersion": resource.api_version,
            "metadata": metadata,
            "items": items,
        }

    def delete(self, key: Key, dry_run: bool) -> Manifest:
        with self._lock:
            self.get(key)
            if not dry_run:
                del self._objects[key]
        return {"kind": "Status", "apiVersion": "v1", "status": "Success", "metadata": {}}

    def create(self, key: Key, manifest: Manifest, dry_run: bool) -> Manifest:
        with self._lock:
            if key in self._objects:
                raise RefusedError(409, "AlreadyExists", f'{key[1]} "{key[3]}" already exists')
            return self.write(key, manifest, dry_run)

    def patch(self, key: Key, changes: Manifest, dry_run: bool) -> Manifest:
        """A merge patch."""
        with self._lock:
            return self.write(key, _merged(self.get(key), changes), dry_run)

    def write(self, key: Key, manifest: Manifest, dry_run: bool) -> Manifest:
        """Create or replace, after the check."""
        with self._lock:
            metadata = {name: value for name, value in manifest["metadata"].items() if name not in SERVERS_OWN}
            written = {name: value for name, value in manifest.items() if name != "status"} | {"metadata": metadata}
            if key[2]:
                metadata["namespace"] = key[2]
            faults = self._check(written)
            if faults:
                causes = "; ".join(map(str, faults[:MAX_CAUSES]))
                raise RefusedError(422, "Invalid", f'{manifest["kind"]} "{key[3]}" is invalid: {causes}', faults)
            kept = self._objects.get(key, {"metadata": {"uid": str(uuid.uuid4()), "creationTimestamp": CREATED}})
            self._version += 1
            server_side = {name: kept["metadata"][name] for name in ("uid", "creationTimestamp")}
            written["metadata"] = metadata | server_side | {"resourceVersion": str(self._version)}
            if not dry_run:
                self._objects[key] = written
            return written


def _merged(base: Manifest, changes: Manifest) -> Manifest:
    merged = dict(base)
    for key, value in changes.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(base.get(key) or {}, value) if isinstance(value, dict) else value
    return merged


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: ApiStore
    kube_version: str
    resources: dict[tuple[str, str], Resource]

    def log_message(self, format: str, *args: object) -> None:
        """Silent: the tests say what went wrong."""

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        try:
            code, answer = self._route(body)
        except RefusedError as refused:
            code, answer = refused.code, refused.status()
        payload = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815

    def _route(self, body: bytes) -> tuple[int, Manifest]:
        url = urlsplit(self.path)
        parts = [part for part in url.path.split("/") if part]
        about = describe(parts, list(self.resources.values()), self.kube_version)
        if about is not None:
            return 200, about
        query = dict(parse_qsl(url.query))
        resource, namespace, name = self._locate(parts)
        key = (resource.api_version, resource.plural, namespace, name)
        dry_run = "dryRun" in query
        if self.command == "GET" and not name:
            if "watch" in query:
                # Clients fall back to asking again.
                raise RefusedError(400, "BadRequest", "this stand-in has no watch")
            return 200, self.store.listed(resource, namespace, query.get("labelSelector", ""))
        if self.command == "GET":
            return 200, self.store.get(key)
        if self.command == "DELETE":
            return 200, self.store.delete(key, dry_run)
        manifest = decode_object(body) if body.startswith(MAGIC) else yaml.load(body, Loader=yaml.CSafeLoader)
        if self.command == "POST":
            return 201, self.store.create((*key[:3], manifest["metadata"]["name"]), manifest, dry_run)
        if self.command == "PATCH" and "apply-patch" not in self.headers["Content-Type"]:
            return 200, self.store.patch(key, manifest, dry_run)
        return 200, self.store.write(key, manifest, dry_run)

    def _locate(self, parts: list[str]) -> tuple[Resource, str, str]:
        """/api/v1/... or /apis/group/version/... -> resource, namespace, name; the last two may be empty."""
        start = 2 if parts[:1] == ["api"] else 3
        api_version, rest = "/".join(parts[1:start]), parts[start:]
        namespace = ""
        if len(rest) > 2 and rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        plural, name = (*rest, "", "")[:2]
        if (api_version, plural) not in self.resources:
            raise RefusedError(404, "NotFound", f"the server could not find the requested resource {self.path}")
        return self.resources[api_version, plural], namespace, name


@contextmanager
def serve_api(check: Check, kube_version: str = "1.31") -> Iterator[tuple[str, ApiStore]]:
    """(URL, store) of a stand-in that lives as long as the context."""
    store = ApiStore(check)
    attributes = {"store": store, "kube_version": kube_version, "resources": all_resources()}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), attributes))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), name="api-stand-in")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", store
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
