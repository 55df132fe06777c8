{{/* The groups of the Ray cluster: head, gateway, and one for each model. */}}

{{- define "espalier.headGroup" -}}
{{- $ports := include "espalier.ports" . | fromYaml -}}
rayStartParams:
  # Ray places nothing here that asks for a CPU.
  num-cpus: "0"
  port: {{ $ports.gcs | quote }}
  dashboard-host: "0.0.0.0"
  dashboard-port: {{ $ports.dashboard | quote }}
  ray-client-server-port: {{ $ports.client | quote }}
  {{- include "espalier.rayStartParams" . | nindent 2 }}
template:
  {{- include "espalier.podTemplate" (dict
      "root" . "component" "head" "group" .Values.head
      "token" .Values.autoscaling.enabled
      "ports" (include "espalier.headContainerPorts" .)) | nindent 2 }}
{{- end -}}

{{/* `replicas` belongs to the autoscaler where there is one. minReplicas is 0 because a running cluster would not take a smaller one later.
     Takes (list root replicas maxReplicas). */}}
{{- define "espalier.groupSize" -}}
{{- if not (index . 0).Values.autoscaling.enabled -}}
replicas: {{ int (index . 1) }}
{{ end -}}
minReplicas: 0
maxReplicas: {{ int (index . 2) }}
{{- end -}}

{{- define "espalier.gatewayGroup" -}}
{{- $volumes := list -}}
{{- $mounts := list -}}
{{- $init := list -}}
{{- range .Values.models -}}
{{- $volumes = append $volumes (include "espalier.modelVolume" (list $ .)) -}}
{{- $mounts = append $mounts (include "espalier.modelMount" (list . false)) -}}
{{- $init = append $init (include "espalier.fetchContainer" (dict "root" $ "model" . "weights" false)) -}}
{{- end -}}
{{- if .Values.auth.existingSecret -}}
{{- $volumes = append $volumes (include "espalier.keyVolumes" .) -}}
{{- $mounts = append $mounts (include "espalier.keyMount" .) -}}
{{- $init = append $init (include "espalier.keyContainer" .) -}}
{{- end -}}
groupName: gateway
{{ include "espalier.groupSize" (list . .Values.gateway.replicas (max 8 .Values.gateway.replicas)) }}
# No CPU: the gateway asks for none, and no engine may come here.
resources:
  CPU: "0"
  {{ include "espalier.gatewayApp" . }}: "1"
rayStartParams:
  {{- include "espalier.rayStartParams" . | nindent 2 }}
template:
  {{- include "espalier.podTemplate" (dict
      "root" . "component" "gateway" "group" .Values.gateway
      "ports" (include "espalier.gatewayContainerPorts" .)
      "readinessProbe" (include "espalier.gatewayReadiness" .)
      "initContainers" (join "\n" (compact $init))
      "volumes" (join "\n" (uniq $volumes))
      "mounts" (join "\n" (uniq $mounts))) | nindent 2 }}
{{- end -}}

{{- define "espalier.gatewayReadiness" -}}
httpGet: {path: /ready, port: serve}
periodSeconds: 5
timeoutSeconds: 3
failureThreshold: 3
{{- end -}}

{{/* Takes (list root model). */}}
{{- define "espalier.workerGroup" -}}
{{- $root := index . 0 -}}
{{- $model := index . 1 -}}
{{- $slug := include "espalier.slug" $model.name -}}
{{- $group := include "espalier.group" . | fromJson -}}
{{- $options := $model.options | default dict -}}
groupName: model-{{ $slug }}
{{ include "espalier.groupSize" (list $root (include "espalier.replicas" $model) $group.maxReplicas) }}
# As many CPUs and GPUs as one replica asks for, so that a pod has one.
resources:
  CPU: {{ dig "cpus" 1 $options | ceil | int | quote }}
  {{- with $options.gpus }}
  GPU: {{ ceil . | int | quote }}
  {{- end }}
  {{ include "espalier.engineApp" $model.name }}: "1"
rayStartParams:
  {{- include "espalier.rayStartParams" $root | nindent 2 }}
template:
  {{- include "espalier.podTemplate" (dict
      "root" $root "component" "worker" "model" $slug "group" $group
      "gpus" (dig "gpus" 0 $options)
      "readinessProbe" (include "espalier.workerReadiness" $root)
      "initContainers" (include "espalier.fetchContainer" (dict "root" $root "model" $model "weights" true))
      "volumes" (include "espalier.modelVolume" (list $root $model))
      "mounts" (include "espalier.modelMount" (list $model false))) | nindent 2 }}
{{- end -}}

{{/* The server's default is two. Takes a model. */}}
{{- define "espalier.replicas" -}}
{{- dig "options" "replicas" 2 . -}}
{{- end -}}

{{/* Ray's daemons on this node. Whether the model is loaded is Serve's business, and the gateway's. */}}
{{- define "espalier.workerReadiness" -}}
{{- $ports := include "espalier.ports" . | fromYaml -}}
httpGet: {path: /api/healthz, port: {{ $ports.agent }}}
initialDelaySeconds: 10
periodSeconds: 5
timeoutSeconds: 2
failureThreshold: 10
{{- end -}}
