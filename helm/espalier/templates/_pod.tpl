{{/* The pod template that head, gateway and worker groups share: one image, one way of writing, one security context. */}}

{{/* Image and security context of every container of ours. */}}
{{- define "espalier.containerBasics" -}}
image: {{ include "espalier.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  {{- toYaml .Values.containerSecurityContext | nindent 2 }}
{{- end -}}

{{/* Everything that caches writes below the home folder: two volumes, since a mount further down would leave folders of root's between. */}}
{{- define "espalier.env" -}}
- {name: HOME, value: /home/espalier}
- {name: XDG_CACHE_HOME, value: /home/espalier/.cache}
- {name: HF_HOME, value: /home/espalier/.cache/huggingface}
- {name: TRITON_CACHE_DIR, value: /home/espalier/.cache/triton}
- {name: TORCHINDUCTOR_CACHE_DIR, value: /home/espalier/.cache/inductor}
- {name: TORCH_EXTENSIONS_DIR, value: /home/espalier/.cache/torch_extensions}
- {name: OMP_WAIT_POLICY, value: PASSIVE}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "espalier.scratchMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/espalier}
- {name: cache, mountPath: /home/espalier/.cache}
{{- end -}}

{{/* Takes (dict "root" $ "size" text "component" text); a claim for the cache is for workers alone. */}}
{{- define "espalier.commonVolumes" -}}
{{- $worker := eq .component "worker" -}}
- name: tmp
  emptyDir: {}
- name: home
  emptyDir: {}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .size | quote }}}
- name: cache
  {{- with .root.Values.cache }}
  {{- if and $worker .existingClaim }}
  persistentVolumeClaim: {claimName: {{ .existingClaim | quote }}}
  {{- else if .sizeLimit }}
  emptyDir: {sizeLimit: {{ .sizeLimit | quote }}}
  {{- else }}
  emptyDir: {}
  {{- end }}
  {{- end }}
{{- end -}}

{{/* Labels by which a component's pods are found: head, gateway or worker; of a model, if it is one's. Takes (dict "root" $ "component" text "model" slug). */}}
{{- define "espalier.podSelector" -}}
{{ include "espalier.selectorLabels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- with .model }}
espalier.io/model: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Kubernetes wants the requests of GPUs equal to their limits. Takes (dict "group" group "gpus" number), the latter optional. */}}
{{- define "espalier.resources" -}}
{{- $resources := deepCopy .group.resources -}}
{{- if .gpus -}}
{{- range $side := list "requests" "limits" -}}
{{- $_ := set $resources $side (merge (dict $.group.gpu.resourceName (ceil $.gpus | int | toString)) (get $resources $side | default dict)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* A pod template. Takes a dict: root, component, group (its settings); and, where there is something to say, model (a slug),
     gpus (of the pod), ports, volumes, mounts, initContainers (YAML lists), readinessProbe (when the group has none of its own), token (mount the
     account's). */}}
{{- define "espalier.podTemplate" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $group := .group -}}
{{- $ports := include "espalier.ports" .root | fromYaml -}}
{{- $selector := include "espalier.podSelector" . -}}
metadata:
  labels:
    {{- $selector | nindent 4 }}
    {{- with merge (dict) $group.podLabels $values.commonLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with merge (dict) $group.podAnnotations $values.commonAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "espalier.serviceAccountName" $root | quote }}
  automountServiceAccountToken: {{ .token | default false }}
  # A Service named espalier would otherwise set ESPALIER_* variables, which the server would take for options.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "espalier.gracePeriod" $root }}
  securityContext:
    {{- toYaml $values.podSecurityContext | nindent 4 }}
  {{- with concat $values.imagePullSecrets $values.global.imagePullSecrets }}
  imagePullSecrets:
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with $group.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- with $group.schedulerName }}
  schedulerName: {{ . | quote }}
  {{- end }}
  {{- with $group.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with $group.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.tolerations }}
  tolerations:
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with $group.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.topologySpreadConstraints }}
  topologySpreadConstraints:
  {{- range . }}
  - {{- toYaml (merge (dict) . (dict "labelSelector" (dict "matchLabels" ($selector | fromYaml)))) | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- if or .initContainers $values.extraInitContainers }}
  initContainers:
  {{- with .initContainers }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with $values.extraInitContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- end }}
  containers:
  - name: ray
    {{- include "espalier.containerBasics" $root | nindent 4 }}
    env:
    {{- include "espalier.env" $root | nindent 4 }}
    {{- with $values.extraEnvFrom }}
    envFrom:
    {{- toYaml . | nindent 4 }}
    {{- end }}
    ports:
    - {name: metrics, containerPort: {{ $ports.metrics }}}
    {{- with .ports }}
    {{- . | nindent 4 }}
    {{- end }}
    resources:
      {{- include "espalier.resources" . | nindent 6 }}
    {{- with $group.livenessProbe }}
    livenessProbe:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- if or $group.readinessProbe .readinessProbe }}
    readinessProbe:
      {{- $group.readinessProbe | default (.readinessProbe | fromYaml) | toYaml | nindent 6 }}
    {{- end }}
    lifecycle:
      preStop:
        exec:
          # Requests that run in this pod have so long, before Ray is told to stop.
          command: [sleep, {{ include "espalier.drainSeconds" $root | quote }}]
    volumeMounts:
    {{- include "espalier.scratchMounts" $root | nindent 4 }}
    - {name: shm, mountPath: /dev/shm}
    {{- with .mounts }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with $values.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $values.extraContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  volumes:
  {{- include "espalier.commonVolumes" (dict "root" $root "size" $group.shm.size "component" .component) | nindent 2 }}
  {{- with .volumes }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with $values.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* The server's default is 30. */}}
{{- define "espalier.drainSeconds" -}}
{{- dig "drain_timeout" 30 .Values.options | ceil | int -}}
{{- end -}}

{{- define "espalier.gracePeriod" -}}
{{- if kindIs "invalid" .Values.terminationGracePeriodSeconds -}}
{{- add (include "espalier.drainSeconds" . | int) 30 -}}
{{- else -}}
{{- int .Values.terminationGracePeriodSeconds -}}
{{- end -}}
{{- end -}}
