{{/* A model's entry: its name in Kubernetes, the settings of its group, and the folder with its files. */}}

{{/* As in names.engine_app_name of the server: lower case, with dashes for everything else. Takes a name. */}}
{{- define "espalier.slug" -}}
{{- regexReplaceAll "[^a-z0-9]+" (lower .) "-" | trimAll "-" -}}
{{- end -}}

{{/* The Serve application of a model, and the Ray resource that ties its replicas to the pods with its files. Takes a name. */}}
{{- define "espalier.engineApp" -}}
espalier-engine-{{ include "espalier.slug" . }}
{{- end -}}

{{- define "espalier.gatewayApp" -}}
espalier-gateway
{{- end -}}

{{/* Two maps as JSON: maps merge, everything else of the second replaces. Sprig's mergeOverwrite would keep the first's value where the second's
     is 0, "" or empty. Takes (list base over). */}}
{{- define "espalier.merge" -}}
{{- $merged := deepCopy (index . 0) -}}
{{- range $key, $value := index . 1 -}}
{{- $below := get $merged $key -}}
{{- if and (kindIs "map" $value) (kindIs "map" $below) -}}
{{- $_ := set $merged $key (include "espalier.merge" (list $below $value) | fromJson) -}}
{{- else -}}
{{- $_ := set $merged $key $value -}}
{{- end -}}
{{- end -}}
{{- toJson $merged -}}
{{- end -}}

{{/* Settings of a model's group: `workers`, and over it what the entry repeats. Takes (list root model). */}}
{{- define "espalier.group" -}}
{{- $workers := (index . 0).Values.workers -}}
{{- $own := dict -}}
{{- range $key, $value := index . 1 -}}
{{- if hasKey $workers $key }}{{ $_ := set $own $key $value }}{{ end -}}
{{- end -}}
{{- include "espalier.merge" (list $workers $own) -}}
{{- end -}}

{{/* Folder of a model's files in every pod that has them. Takes a model. */}}
{{- define "espalier.modelFolder" -}}
{{- $source := .source -}}
{{- if .model -}}
{{- .model -}}
{{- else if $source.hostPath -}}
{{- $source.hostPath -}}
{{- else if $source.pvc -}}
{{- $source.pvc.mountPath -}}
{{- else -}}
/models/{{ include "espalier.slug" .name }}
{{- end -}}
{{- end -}}

{{/* Several models may lie on one claim: equal sources have equal volumes, of which a pod has one. A claim whose name is none for a volume gets a
     hash, so that claims that differ stay different. Takes a model. */}}
{{- define "espalier.modelVolumeName" -}}
{{- $mode := ternary "" "-rw" (dig "readOnly" true .source) -}}
{{- if .source.hub -}}
hub
{{- else if .source.pvc -}}
{{- $claim := .source.pvc.claim -}}
{{- if or (contains "." $claim) (gt (len $claim) 50) -}}
{{- $claim = printf "%s-%s" ($claim | replace "." "-" | trunc 40 | trimSuffix "-") ($claim | sha256sum | trunc 8) -}}
{{- end -}}
claim-{{ $claim }}{{ $mode }}
{{- else -}}
model-{{ include "espalier.slug" .name }}
{{- end -}}
{{- end -}}

{{/* One volume as a list. Takes (list root model). */}}
{{- define "espalier.modelVolume" -}}
{{- $root := index . 0 -}}
{{- $model := index . 1 -}}
{{- $source := $model.source -}}
- name: {{ include "espalier.modelVolumeName" $model }}
  {{- if $source.pvc }}
  persistentVolumeClaim: {claimName: {{ $source.pvc.claim | quote }}, readOnly: {{ dig "readOnly" true $source }}}
  {{- else if $source.hostPath }}
  hostPath: {path: {{ $source.hostPath | quote }}, type: Directory}
  {{- else if include "espalier.hubClaim" $root }}
  persistentVolumeClaim: {claimName: {{ include "espalier.hubClaim" $root | quote }}}
  {{- else if $root.Values.hub.storage.sizeLimit }}
  emptyDir: {sizeLimit: {{ $root.Values.hub.storage.sizeLimit | quote }}}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end -}}

{{/* One mount as a list. Takes (list model writable); only the download writes to a hub model. */}}
{{- define "espalier.modelMount" -}}
{{- $model := index . 0 -}}
{{- $source := $model.source -}}
- name: {{ include "espalier.modelVolumeName" $model }}
  {{- if $source.hub }}
  mountPath: {{ include "espalier.modelFolder" $model | quote }}
  # A folder for each revision, so that a shared claim may hold several.
  subPath: {{ printf "%s/%s" (include "espalier.slug" $model.name) ($source.hub.revision | replace "/" "-") | quote }}
  readOnly: {{ not (index . 1) }}
  {{- else }}
  mountPath: {{ $source.hostPath | default (dig "pvc" "mountPath" "" $source) | quote }}
  readOnly: {{ dig "readOnly" true $source }}
  {{- end }}
{{- end -}}

{{/* The claim that hub models share, if there is one. */}}
{{- define "espalier.hubClaim" -}}
{{- with .Values.hub.storage -}}
{{- if .existingClaim -}}
{{- .existingClaim -}}
{{- else if .create -}}
{{- include "espalier.nameFor" (list $ "models") -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The init container that downloads a hub model at its revision; nothing for other sources.
     Takes (dict "root" $ "model" model "weights" bool); without weights only what the gateway reads. */}}
{{- define "espalier.fetchContainer" -}}
{{- $root := .root -}}
{{- $model := .model -}}
{{- $text := list "*.json" "*.jinja" "*.txt" "*.model" -}}
{{- with $model.source.hub -}}
- name: fetch-{{ include "espalier.slug" $model.name }}
  {{- include "espalier.containerBasics" $root | nindent 2 }}
  command:
  - hf
  - download
  - {{ .repo | quote }}
  - --revision
  - {{ .revision | quote }}
  - --local-dir
  - {{ include "espalier.modelFolder" $model | quote }}
  {{- range ternary (append $text "*.safetensors") $text $.weights }}
  - --include
  - {{ . | quote }}
  {{- end }}
  env:
  {{- include "espalier.env" $root | nindent 2 }}
  {{- with $root.Values.hub }}
  {{- with .endpoint }}
  - {name: HF_ENDPOINT, value: {{ . | quote }}}
  {{- end }}
  {{- if .token.existingSecret }}
  - name: HF_TOKEN
    valueFrom:
      secretKeyRef: {name: {{ .token.existingSecret | quote }}, key: {{ .token.key | quote }}}
  {{- end }}
  {{- end }}
  {{- with $root.Values.extraEnvFrom }}
  envFrom:
  {{- toYaml . | nindent 2 }}
  {{- end }}
  resources:
    {{- toYaml $root.Values.hub.resources | nindent 4 }}
  volumeMounts:
  {{- include "espalier.scratchMounts" $root | nindent 2 }}
  {{- include "espalier.modelMount" (list $model true) | nindent 2 }}
{{- end -}}
{{- end -}}
