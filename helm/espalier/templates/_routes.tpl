{{/* Ingress objects, one for each wire. */}}

{{/* Takes (dict "root" $ "name" name "values" ingress "port" port name). */}}
{{- define "espalier.ingress" -}}
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata:
  {{- include "espalier.metadata" (dict "root" .root "name" .name "annotations" .values.annotations) | nindent 2 }}
spec:
  {{- with .values.className }}
  ingressClassName: {{ . | quote }}
  {{- end }}
  {{- with .values.tls }}
  tls:
  {{- toYaml . | nindent 2 }}
  {{- end }}
  rules:
  {{- range .values.hosts | default (list "") }}
  - {{ with . }}host: {{ . | quote }}
    {{ end }}http:
      paths:
      - path: /
        pathType: Prefix
        backend:
          service:
            name: {{ $.name | quote }}
            port: {name: {{ $.port }}}
  {{- end }}
{{- end -}}

{{/* The part of a Gateway-API route that both kinds share. Takes (dict "root" $ "name" name "values" route). */}}
{{- define "espalier.routeParents" -}}
parentRefs:
{{ toYaml .values.parentRefs }}
{{- with .values.hostnames }}
hostnames:
{{ toYaml . }}
{{- end }}
{{- end -}}
