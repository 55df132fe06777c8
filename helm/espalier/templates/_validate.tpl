{{/* Combinations that a schema cannot refuse: names that Kubernetes or KubeRay would not take, and settings that contradict each other. */}}

{{- define "espalier.validate" -}}
{{- $name := include "espalier.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "the name %q of the RayService must start with a letter and have lower-case letters, digits and dashes only: choose another release name, or set fullnameOverride" $name) -}}
{{- end -}}
{{- if not .Values.models -}}
{{- fail "models: name at least one model; the chart's values-*.yaml files are examples" -}}
{{- end -}}
{{- include "espalier.validateModels" . -}}
{{- include "espalier.validatePorts" . -}}
{{- if eq .Values.upgradeStrategy.type "NewClusterWithIncrementalUpgrade" -}}
{{- fail "upgradeStrategy.type: NewClusterWithIncrementalUpgrade shifts only HTTP traffic that goes through Serve's own proxy; Espalier's gateway listens for itself, on HTTP and gRPC. Use NewCluster or None" -}}
{{- end -}}
{{- if lt (int (include "espalier.gracePeriod" .)) (int (include "espalier.drainSeconds" .)) -}}
{{- fail "terminationGracePeriodSeconds: must not be shorter than options.drain_timeout" -}}
{{- end -}}
{{- with .Values.gcsFaultTolerance -}}
{{- if and .enabled (not .redisAddress) -}}
{{- fail "gcsFaultTolerance.redisAddress: name your Redis, or set gcsFaultTolerance.enabled to false" -}}
{{- end -}}
{{- range $.Values.extraEnv -}}
{{- if has .name (list "RAY_REDIS_ADDRESS" "REDIS_PASSWORD" "REDIS_USERNAME") -}}
{{- fail (printf "extraEnv: %s is set by gcsFaultTolerance; KubeRay refuses both" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range .Values.extraEnv -}}
{{- if eq .name "RAY_enable_autoscaler_v2" -}}
{{- fail "extraEnv: RAY_enable_autoscaler_v2 is set by autoscaling.enabled; KubeRay refuses both" -}}
{{- end -}}
{{- end -}}
{{- with .Values.monitoring.serviceMonitor -}}
{{- if and .enabled $.Values.auth.existingSecret (not .authorization.existingSecret) (not $.Values.gateway.options.metrics_open) -}}
{{- fail "monitoring.serviceMonitor.authorization.existingSecret: /metrics asks for a key when auth.existingSecret is set; name a Secret with one, or set gateway.options.metrics_open" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.hub.storage.create .Values.hub.storage.existingClaim -}}
{{- fail "hub.storage: create and existingClaim are both set; choose one" -}}
{{- end -}}
{{- range $route := list "httpRoute" "grpcRoute" -}}
{{- with get $.Values $route -}}
{{- if and .enabled (not .parentRefs) -}}
{{- fail (printf "%s.parentRefs: name the Gateway that it belongs to" $route) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "espalier.validateModels" -}}
{{- $slugs := dict -}}
{{- $mounts := dict -}}
{{- range $index, $model := .Values.models -}}
{{- $where := printf "models[%d]" $index -}}
{{- $slug := include "espalier.slug" .name -}}
{{- if or (not $slug) (gt (len $slug) 40) -}}
{{- fail (printf "%s.name: %q makes the Kubernetes name %q, which must have 1 to 40 characters" $where .name $slug) -}}
{{- end -}}
{{- if hasKey $slugs $slug -}}
{{- fail (printf "%s.name: %q and %q differ in punctuation alone, and would share the name %q" $where (get $slugs $slug) .name $slug) -}}
{{- end -}}
{{- $_ := set $slugs $slug .name -}}
{{- if gt (int (include "espalier.replicas" .)) (int (include "espalier.group" (list $ .) | fromJson).maxReplicas) -}}
{{- fail (printf "%s.options.replicas: is more than maxReplicas" $where) -}}
{{- end -}}
{{- $mount := include "espalier.modelMount" (list . false) | fromYamlArray | first -}}
{{- if and (hasKey $mounts $mount.mountPath) (ne (get $mounts $mount.mountPath) (toYaml $mount)) -}}
{{- fail (printf "%s.source: another model has its files at %s too" $where $mount.mountPath) -}}
{{- end -}}
{{- $_ := set $mounts $mount.mountPath (toYaml $mount) -}}
{{- if not (hasPrefix (printf "%s/" (trimSuffix "/" $mount.mountPath)) (printf "%s/" (include "espalier.modelFolder" .))) -}}
{{- fail (printf "%s.model: %s does not lie in %s, where its source is mounted" $where (include "espalier.modelFolder" .) $mount.mountPath) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "espalier.validatePorts" -}}
{{- $ports := include "espalier.ports" . | fromYaml -}}
{{- $first := int $ports.firstWorker -}}
{{- $last := int $ports.lastWorker -}}
{{- $taken := dict -}}
{{- range $name, $port := omit $ports "firstWorker" "lastWorker" -}}
{{- $number := toString (int $port) -}}
{{- if or (hasKey $taken $number) (and (ge (int $port) $first) (le (int $port) $last)) -}}
{{- fail (printf "gateway.options: port %s is Ray's or used twice; choose another http_port or grpc_port" $number) -}}
{{- end -}}
{{- $_ := set $taken $number $name -}}
{{- end -}}
{{- end -}}
