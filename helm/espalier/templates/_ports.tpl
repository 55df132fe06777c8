{{/* Every port that something in a pod listens on. No two of one pod may be equal: Ray would fail, or take ours. */}}

{{- define "espalier.ports" -}}
# In every pod: Ray's daemons and its workers.
nodeManager: 6380
objectManager: 6381
agentGrpc: 6382
runtimeEnvAgent: 6383
metrics: 8080
firstWorker: 10002
lastWorker: 19999
agent: 52365
# In the head pod.
gcs: 6379
dashboard: 8265
client: 10001
autoscalerMetrics: 44217
dashboardMetrics: 44227
# In gateway pods.
http: {{ dig "http_port" 5000 .Values.gateway.options }}
grpc: {{ dig "grpc_port" 50051 .Values.gateway.options }}
{{- end -}}

{{/* rayStartParams of every pod. */}}
{{- define "espalier.rayStartParams" -}}
{{- $ports := include "espalier.ports" . | fromYaml -}}
node-manager-port: {{ $ports.nodeManager | quote }}
object-manager-port: {{ $ports.objectManager | quote }}
dashboard-agent-grpc-port: {{ $ports.agentGrpc | quote }}
dashboard-agent-listen-port: {{ $ports.agent | quote }}
runtime-env-agent-port: {{ $ports.runtimeEnvAgent | quote }}
metrics-export-port: {{ $ports.metrics | quote }}
min-worker-port: {{ $ports.firstWorker | quote }}
max-worker-port: {{ $ports.lastWorker | quote }}
# 80 MiB, of shm: nothing large goes through Ray's object store.
object-store-memory: "83886080"
{{- end -}}

{{- define "espalier.headContainerPorts" -}}
{{- $ports := include "espalier.ports" . | fromYaml -}}
- {name: gcs-server, containerPort: {{ $ports.gcs }}}
- {name: dashboard, containerPort: {{ $ports.dashboard }}}
- {name: client, containerPort: {{ $ports.client }}}
- {name: as-metrics, containerPort: {{ $ports.autoscalerMetrics }}}
- {name: dash-metrics, containerPort: {{ $ports.dashboardMetrics }}}
# Nothing listens on these here: KubeRay's Serve Service has the ports of the head that are called so. It selects workers, and finds them by name.
- {name: serve, containerPort: {{ $ports.http }}}
- {name: serve-grpc, containerPort: {{ $ports.grpc }}}
{{- end -}}

{{- define "espalier.gatewayContainerPorts" -}}
{{- $ports := include "espalier.ports" . | fromYaml -}}
- {name: serve, containerPort: {{ $ports.http }}}
- {name: serve-grpc, containerPort: {{ $ports.grpc }}}
{{- end -}}
