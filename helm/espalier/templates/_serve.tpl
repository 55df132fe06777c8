{{/* serveConfigV2: what `espalier render` writes as a plain Serve config, from the same values. */}}

{{- define "espalier.serveConfig" -}}
{{- $applications := list -}}
{{- $served := list -}}
{{- range .Values.models -}}
{{- $options := .options | default dict -}}
{{- $named := dict "name" .name "model" (include "espalier.modelFolder" .) -}}
{{- $args := include "espalier.merge" (list (merge (dict) $options $named) $.Values.options) | fromJson -}}
{{- $applications = append $applications (include "espalier.application" (dict "name" (include "espalier.engineApp" .name) "builder" "engine_from_options" "args" $args) | fromJson) -}}
{{- $served = append $served (merge (dict) $named (pick $options "progress_timeout")) -}}
{{- end -}}
{{- $gateway := include "espalier.merge" (list .Values.gateway.options .Values.options) | fromJson -}}
{{- $_ := set $gateway "host" "0.0.0.0" -}}
{{- $_ := set $gateway "models" $served -}}
{{- if .Values.auth.existingSecret -}}
{{- $_ := set $gateway "api_key_file" (include "espalier.keyFile" .) -}}
{{- end -}}
{{- $application := include "espalier.application" (dict "name" (include "espalier.gatewayApp" .) "builder" "gateway_from_options" "args" $gateway) | fromJson -}}
{{- if gt (int .Values.gateway.replicas) 1 -}}
{{- $_ := set $application "deployments" (list (dict "name" "Gateway" "num_replicas" (int .Values.gateway.replicas) "max_replicas_per_node" 1)) -}}
{{- end -}}
{{- $applications = append $applications $application -}}
# The gateway listens for itself.
proxy_location: Disabled
applications:
{{ toYaml $applications }}
{{- end -}}

{{/* One application as JSON. Its processes run where a pod declares the Ray resource with its name, of which each takes a trace.
     Takes (dict "name" name "builder" function "args" map). */}}
{{- define "espalier.application" -}}
{{- dict
      "name" .name
      "route_prefix" nil
      "import_path" (printf "espalier.cluster.serve_config:%s" .builder)
      "args" (merge (dict "resources" (dict .name 0.001)) .args) | toJson -}}
{{- end -}}
