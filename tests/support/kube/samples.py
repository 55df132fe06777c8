"""Sound objects that tests of validators plant one fault in. Small, not those of the chart."""

import copy
from typing import Any

import yaml

Manifest = dict[str, Any]
REMOVED = object()

DEPLOYMENT = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, labels: {app: web}}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web, tier: front}}
    spec:
      volumes: [{name: data, emptyDir: {sizeLimit: 1Gi}}]
      containers:
      - name: web
        image: web:1
        env: [{name: A, value: "1"}]
        ports: [{name: http, containerPort: 80}, {name: grpc, containerPort: 81}]
        readinessProbe: {httpGet: {path: /, port: http}}
        volumeMounts: [{name: data, mountPath: /data}]
        resources:
          requests: {cpu: 500m, memory: 1Gi, nvidia.com/gpu: 1}
          limits: {memory: 2Gi, nvidia.com/gpu: 1}
"""
SERVICE = """
apiVersion: v1
kind: Service
metadata: {name: web, labels: {app: web}}
spec:
  selector: {app: web}
  ports: [{name: http, port: 80, targetPort: http}, {name: grpc, port: 81, targetPort: grpc}]
"""
RAYSERVICE = """
apiVersion: ray.io/v1
kind: RayService
metadata: {name: llm}
spec:
  upgradeStrategy: {type: NewCluster}
  excludeHeadPodFromServeSvc: true
  serveConfigV2: |
    proxy_location: Disabled
    applications:
    - name: gateway
      import_path: "some.module:gateway_from"
      args: {http_port: 8000}
  serveService:
    spec:
      ports: [{name: serve-grpc, port: 50051, appProtocol: kubernetes.io/h2c}]
  rayClusterConfig:
    rayVersion: 2.60.0
    headGroupSpec:
      rayStartParams: {num-cpus: "0", metrics-export-port: "8081"}
      template: &pod
        spec:
          enableServiceLinks: false
          volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 1Gi}}]
          containers:
          - name: ray
            image: llm:1
            ports: [{name: serve, containerPort: 8000}, {name: serve-grpc, containerPort: 50051}]
            volumeMounts: [{name: shm, mountPath: /dev/shm}]
            resources: {limits: {memory: 4Gi}}
    workerGroupSpecs:
    - groupName: gpu
      replicas: 1
      minReplicas: 1
      maxReplicas: 2
      rayStartParams: {metrics-export-port: "8081"}
      template: *pod
"""


def sound(text: str) -> Manifest:
    """A sample as an object of its own; YAML's shared parts are copied."""
    manifest: Manifest = yaml.safe_load(text)
    return _unshared(manifest)


def _unshared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def changed(manifest: Manifest, path: str, value: Any) -> Manifest:
    """A copy with one value set, or REMOVED. The path's parts have slashes between; a key with a slash of its own is written with ~1 in it."""
    out = copy.deepcopy(manifest)
    *parents, last = [part.replace("~1", "/") for part in path.split("/")]
    inner: Any = out
    for part in parents:
        inner = inner[int(part)] if isinstance(inner, list) else inner.setdefault(part, {})
    key: Any = int(last) if isinstance(inner, list) else last
    if value is REMOVED:
        del inner[key]
    elif isinstance(inner, list) and key == len(inner):
        inner.append(value)
    else:
        inner[key] = value
    return out
