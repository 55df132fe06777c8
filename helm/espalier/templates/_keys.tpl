{{/* Clients' keys. The server wants a file of mode 0600 that it may read; the files of a Secret's volume belong to root and, with an fsGroup, are
     readable by the group. So a small container beside the gateway copies the file, again whenever the Secret changes. */}}

{{/* Where the gateway reads them: `api_key_file`. */}}
{{- define "espalier.keyFile" -}}
/etc/espalier/api-keys/{{ .Values.auth.key }}
{{- end -}}

{{- define "espalier.keyVolumes" -}}
- name: api-keys-secret
  secret:
    secretName: {{ .Values.auth.existingSecret | quote }}
    items: [{key: {{ .Values.auth.key | quote }}, path: keys}]
- name: api-keys
  emptyDir: {medium: Memory}
{{- end -}}

{{- define "espalier.keyMount" -}}
- {name: api-keys, mountPath: {{ dir (include "espalier.keyFile" .) }}, readOnly: true}
{{- end -}}

{{- define "espalier.keyContainer" -}}
{{- $file := include "espalier.keyFile" . -}}
- name: api-keys
  {{- include "espalier.containerBasics" . | nindent 2 }}
  # Runs as long as the pod; the gateway starts once the first copy is there.
  restartPolicy: Always
  command:
  - bash
  - -c
  - |
    umask 077
    trap 'exit 0' TERM
    while true; do
      if ! cmp -s /run/secrets/espalier/keys {{ $file }}; then
        cp /run/secrets/espalier/keys {{ $file }}.new && chmod 0600 {{ $file }}.new && mv {{ $file }}.new {{ $file }}
      fi
      sleep 5 & wait $!
    done
  startupProbe:
    exec:
      command: [test, -s, {{ $file }}]
    periodSeconds: 1
    failureThreshold: 60
  resources:
    requests: {cpu: 5m, memory: 16Mi}
    limits: {memory: 64Mi}
  volumeMounts:
  - {name: api-keys-secret, mountPath: /run/secrets/espalier, readOnly: true}
  - {name: api-keys, mountPath: {{ dir $file }}}
{{- end -}}
