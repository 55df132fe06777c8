{{/* Names, labels and image references. */}}

{{- define "espalier.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* KubeRay adds up to 16 characters to a RayService's name, so it may have 47; _validate.tpl refuses what is no DNS-1035 name. */}}
{{- define "espalier.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 47 | trimSuffix "-" -}}
{{- else if contains (include "espalier.name" .) .Release.Name -}}
{{- .Release.Name | trunc 47 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "espalier.name" .) | trunc 47 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* `fullname-suffix`: services, claims, ConfigMaps. What is longer than 63 characters ends in a hash, so that names that differ stay different.
     Takes (list root suffix). */}}
{{- define "espalier.nameFor" -}}
{{- $name := printf "%s-%s" (include "espalier.fullname" (index . 0)) (index . 1) -}}
{{- if gt (len $name) 63 -}}
{{- printf "%s-%s" ($name | trunc 54 | trimSuffix "-") ($name | sha256sum | trunc 8) -}}
{{- else -}}
{{- $name -}}
{{- end -}}
{{- end -}}

{{- define "espalier.selectorLabels" -}}
app.kubernetes.io/name: {{ include "espalier.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "espalier.labels" -}}
{{ include "espalier.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: espalier
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Name, namespace, labels and annotations of an object.
     Takes (dict "root" $ "name" name "labels" map "annotations" map "namespace" text), all but root and name optional. */}}
{{- define "espalier.metadata" -}}
name: {{ .name | quote }}
namespace: {{ .namespace | default .root.Release.Namespace | quote }}
labels:
  {{- merge (dict) (.labels | default dict) (include "espalier.labels" .root | fromYaml) | toYaml | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "espalier.image" -}}
{{- $image := .Values.image -}}
{{- $registry := .Values.global.imageRegistry | default $image.registry -}}
{{- with $registry }}{{ . }}/{{ end -}}
{{- $image.repository -}}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default .Chart.AppVersion }}{{ end -}}
{{- end -}}

{{- define "espalier.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "espalier.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}
