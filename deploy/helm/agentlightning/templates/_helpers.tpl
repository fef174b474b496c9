{{- define "agl.labels" -}}
app.kubernetes.io/name: agentlightning
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "agl.image" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{- define "agl.pod" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 65534
  runAsGroup: 65534
  seccompProfile: { type: RuntimeDefault }
volumes:
  - name: tmp
    emptyDir: {}
{{- end }}

{{- define "agl.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
volumeMounts:
  - name: tmp
    mountPath: /tmp
{{- end }}

{{- define "agl.key" -}}
- name: {{ .name }}
  valueFrom:
    secretKeyRef:
      name: {{ .root.Values.secret }}
      key: {{ .key }}
{{- if .optional }}
      optional: true
{{- end }}
{{- end }}

{{- define "agl.probes" -}}
startupProbe:
  httpGet: { path: {{ .path }}, port: http }
  periodSeconds: 2
  failureThreshold: 150
readinessProbe:
  httpGet: { path: {{ .path }}, port: http }
  periodSeconds: 5
{{- end }}

{{- define "agl.server" -}}
{{ .Values.runner.server | default (printf "http://%s-store:4747" .Release.Name) }}
{{- end }}

{{- define "agl.hosts" -}}
{{- $name := .service }}
{{- $within := printf "%s.%s" $name .root.Release.Namespace }}
{{- $hosts := list (printf ".%s" $name) (printf ".%s" $within) (printf ".%s.svc" $within) (printf ".%s.svc.cluster.local" $within) }}
{{- if and .root.Values.ingress.enabled .root.Values.ingress.host }}{{ $hosts = append $hosts .root.Values.ingress.host }}{{ end }}
{{- join "," (concat $hosts .root.Values.allowHosts) }}
{{- end }}
