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
{{- include "espalier.validateMounts" . -}}
{{- include "espalier.validateShm" (list "head" .Values.head) -}}
{{- include "espalier.validateShm" (list "gateway" .Values.gateway) -}}
{{- include "espalier.validateLabels" . -}}
{{- include "espalier.validateExtras" . -}}
{{- include "espalier.validatePorts" . -}}
{{- if eq .Values.upgradeStrategy.type "NewClusterWithIncrementalUpgrade" -}}
{{- fail "upgradeStrategy.type: NewClusterWithIncrementalUpgrade shifts only HTTP traffic that goes through Serve's own proxy; Espalier's gateway listens for itself, on HTTP and gRPC. Use NewCluster or None" -}}
{{- end -}}
{{- if lt (int (include "espalier.gracePeriod" .)) (int (include "espalier.drainSeconds" .)) -}}
{{- fail "terminationGracePeriodSeconds: must not be shorter than options.drain_timeout" -}}
{{- end -}}
{{- with .Values.gcsFaultTolerance -}}
{{- if and .usernameKey (not .existingSecret) -}}
{{- fail "gcsFaultTolerance.existingSecret: name the Secret that has the entry usernameKey" -}}
{{- end -}}
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
{{- if and .Values.rayAuth.enabled (semverCompare "<2.52.0" .Values.rayVersion) -}}
{{- fail "rayVersion: rayAuth needs Ray 2.52.0 or newer" -}}
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
{{- range $index, $model := .Values.models -}}
{{- $where := printf "models[%d]" $index -}}
{{- $slug := include "espalier.slug" .name -}}
{{- if or (not $slug) (gt (len $slug) 40) -}}
{{- fail (printf "%s.name: %q makes the Kubernetes name %q, which must have 1 to 40 characters" $where .name $slug) -}}
{{- end -}}
{{- if eq (get $slugs $slug) .name -}}
{{- fail (printf "%s.name: %q is the name of another model too" $where .name) -}}
{{- end -}}
{{- if hasKey $slugs $slug -}}
{{- fail (printf "%s.name: %q and %q differ in punctuation alone, and would share the name %q" $where (get $slugs $slug) .name $slug) -}}
{{- end -}}
{{- $_ := set $slugs $slug .name -}}
{{- $group := include "espalier.group" (list $ .) | fromJson -}}
{{- include "espalier.validateShm" (list $where $group) -}}
{{- include "espalier.validateHostTier" (list $where . $group) -}}
{{- if gt (int (include "espalier.replicas" .)) (int $group.maxReplicas) -}}
{{- fail (printf "%s.options.replicas: is more than maxReplicas" $where) -}}
{{- end -}}
{{- range $side := list "requests" "limits" -}}
{{- if hasKey (get $group.resources $side | default dict) $group.gpu.resourceName -}}
{{- fail (printf "%s: resources.%s says %s itself; set options.gpus, which Ray needs to know too" $where $side $group.gpu.resourceName) -}}
{{- end -}}
{{- end -}}
{{- if and .source.hub (hasKey .source "readOnly") -}}
{{- fail (printf "%s.source.readOnly: folders of hub models are always read-only" $where) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Two mounts at one place do not work, nor does one below another that is read-only, as models' are. */}}
{{- define "espalier.validateMounts" -}}
{{- $ours := list "/dev/shm" "/etc/espalier/api-keys" "/home/espalier" "/opt/espalier" "/proc" "/run" "/sys" "/tmp" -}}
{{- $mounts := dict -}}
{{- range $index, $model := .Values.models -}}
{{- $where := printf "models[%d]" $index -}}
{{- $folder := include "espalier.modelFolder" . -}}
{{- $mount := include "espalier.modelMount" (list . false) | fromYamlArray | first -}}
{{- $path := $mount.mountPath -}}
{{- range $part := splitList "/" (printf "%s%s" $folder $path) -}}
{{- if has $part (list "." "..") -}}
{{- fail (printf "%s: a folder must be named without . and ..: %s, %s" $where $folder $path) -}}
{{- end -}}
{{- end -}}
{{- if not (hasPrefix (printf "%s/" $path) (printf "%s/" $folder)) -}}
{{- fail (printf "%s.model: %s does not lie in %s, where its source is mounted" $where $folder $path) -}}
{{- end -}}
{{- range $other := $ours -}}
{{- if hasPrefix (printf "%s/" $path) (printf "%s/" $other) -}}
{{- fail (printf "%s.source: %s would hide %s of the pods" $where $path $other) -}}
{{- end -}}
{{- end -}}
{{- range $other, $theirs := $mounts -}}
{{- $nested := or (hasPrefix (printf "%s/" $other) (printf "%s/" $path)) (hasPrefix (printf "%s/" $path) (printf "%s/" $other)) -}}
{{- if and $nested (ne $theirs (toYaml $mount)) -}}
{{- fail (printf "%s.source: another model has its files at %s, so that %s cannot be mounted" $where $other $path) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $mounts $path (toYaml $mount) -}}
{{- end -}}
{{- end -}}

{{/* Labels by which the chart and KubeRay find objects are theirs. */}}
{{- define "espalier.validateLabels" -}}
{{- $maps := dict "commonLabels" .Values.commonLabels -}}
{{- range $group := list "workers" "head" "gateway" -}}
{{- $_ := set $maps (printf "%s.podLabels" $group) (get $.Values $group).podLabels -}}
{{- end -}}
{{- range $index, $model := .Values.models -}}
{{- $_ := set $maps (printf "models[%d].podLabels" $index) ($model.podLabels | default dict) -}}
{{- end -}}
{{- range $monitor, $values := .Values.monitoring -}}
{{- $_ := set $maps (printf "monitoring.%s.labels" $monitor) $values.labels -}}
{{- end -}}
{{- range $path, $labels := $maps -}}
{{- range $name := keys $labels | sortAlpha -}}
{{- if not (regexMatch "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$" $name) -}}
{{- fail (printf "%s: %q is no name of a label" $path $name) -}}
{{- end -}}
{{- if regexMatch "^(app\\.kubernetes\\.io/(name|instance|version|managed-by|part-of|component)|helm\\.sh/chart|(ray|espalier)\\.io/.*)$" $name -}}
{{- fail (printf "%s: the label %s is the chart's or KubeRay's own" $path $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What is put beside the chart's own must have names and places of its own. */}}
{{- define "espalier.validateExtras" -}}
{{- $volumes := include "espalier.commonVolumes" (dict "root" . "size" "1Gi" "component" "head") | fromYamlArray -}}
{{- range .Values.models }}{{ $volumes = concat $volumes (include "espalier.modelVolume" (list $ .) | fromYamlArray) }}{{ end -}}
{{- $taken := dict
      "extraEnv" (include "espalier.env" (dict "Values" (dict "extraEnv" list)) | fromYamlArray)
      "extraVolumes" (concat $volumes (include "espalier.keyVolumes" . | fromYamlArray))
      "extraContainers" (list (dict "name" "ray") (dict "name" "autoscaler"))
      "extraInitContainers" (list (dict "name" "wait-gcs-ready") (dict "name" "api-keys")) -}}
{{- range $value, $ours := $taken -}}
{{- $names := dict -}}
{{- range $ours }}{{ $_ := set $names .name "" }}{{ end -}}
{{- range $index, $entry := get $.Values $value -}}
{{- if hasKey $names .name -}}
{{- fail (printf "%s[%d].name: %s is there already" $value $index .name) -}}
{{- end -}}
{{- $_ := set $names .name "" -}}
{{- end -}}
{{- end -}}
{{- $names := dict -}}
{{- range concat $volumes .Values.extraVolumes }}{{ $_ := set $names .name "" }}{{ end -}}
{{- $places := dict "/dev/shm" "" -}}
{{- range include "espalier.scratchMounts" . | fromYamlArray }}{{ $_ := set $places .mountPath "" }}{{ end -}}
{{- range .Values.models }}{{ $_ := set $places (include "espalier.modelMount" (list . false) | fromYamlArray | first).mountPath "" }}{{ end -}}
{{- range $index, $mount := .Values.extraVolumeMounts -}}
{{- if not (hasKey $names .name) -}}
{{- fail (printf "extraVolumeMounts[%d].name: no volume is named %s" $index .name) -}}
{{- end -}}
{{- if hasKey $places .mountPath -}}
{{- fail (printf "extraVolumeMounts[%d].mountPath: something is mounted at %s already" $index .mountPath) -}}
{{- end -}}
{{- $_ := set $places .mountPath "" -}}
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

{{/* /dev/shm is memory of the pod, and Ray's object store lies in it. Takes (list path group). */}}
{{- define "espalier.validateShm" -}}
{{- $size := (index . 1).shm.size -}}
{{- if lt (include "espalier.bytes" $size | float64) (include "espalier.bytes" "80Mi" | float64) -}}
{{- fail (printf "%s.shm.size: %s is less than the 80Mi of Ray's object store" (index . 0) $size) -}}
{{- end -}}
{{- with dig "limits" "memory" "" ((index . 1).resources) -}}
{{- if gt (include "espalier.bytes" $size | float64) (include "espalier.bytes" . | float64) -}}
{{- fail (printf "%s.shm.size: %s is more than resources.limits.memory, %v, which it counts against" (index $ 0) $size .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The host tier of the KV cache is memory of the pod. Takes (list path model group). */}}
{{- define "espalier.validateHostTier" -}}
{{- $size := dig "options" "host_kv_gb" 0 (index . 1) -}}
{{- with dig "limits" "memory" "" ((index . 2).resources) -}}
{{- if gt (mulf $size 1073741824) (include "espalier.bytes" . | float64) -}}
{{- fail (printf "%s.options.host_kv_gb: %v GiB are more than resources.limits.memory, %v, which they count against" (index $ 0) $size .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Bytes of a quantity of memory. Takes a quantity. */}}
{{- define "espalier.bytes" -}}
{{- $factors := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18
      "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 -}}
{{- $unit := regexFind "[kMGTPEi]*$" (toString .) -}}
{{- mulf (trimSuffix $unit (toString .) | float64) (get $factors $unit | float64) | printf "%.0f" -}}
{{- end -}}
