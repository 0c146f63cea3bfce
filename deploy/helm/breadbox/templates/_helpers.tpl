{{- /* The name of a part, of its objects and of its label. (dict "root" $ "part" "server") */ -}}
{{- define "breadbox.name" -}}
{{- printf "%s%s" .root.Values.namePrefix .part -}}
{{- end -}}

{{- define "breadbox.labels" -}}
app.kubernetes.io/part-of: breadbox
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* An image of ours. (dict "root" $ "name" "server" "gpu" 0) */ -}}
{{- define "breadbox.image" -}}
{{- $images := .root.Values.images -}}
{{- printf "%sbreadbox/%s:%s%s" $images.registry .name (default .root.Chart.AppVersion $images.tag) (ternary "-cuda" "" (gt (int .gpu) 0)) -}}
{{- end -}}

{{- define "breadbox.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .user }}
runAsGroup: {{ .user }}
{{- if .ownsVolumes }}
fsGroup: {{ .user }}
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "breadbox.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: ["ALL"]}
{{- end -}}

{{- /* What a pod of ours has beside its containers. (dict "root" $ "part" .Values.server) */ -}}
{{- define "breadbox.placement" -}}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Resources of a part, with its GPUs. */ -}}
{{- define "breadbox.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if gt (int .gpu) 0 -}}
{{- $_ := set $resources "limits" (merge (dict "nvidia.com/gpu" (int .gpu)) (default dict $resources.limits)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- /* How a client reaches the server. (dict "root" $ "secret" NAME "part" .Values.learner) */ -}}
{{- define "breadbox.clientEnv" -}}
- {name: BREADBOX_SERVER, value: "dns:///{{ include "breadbox.name" (dict "root" .root "part" "server") }}:50051"}
{{- if .root.Values.tls.enabled }}
- {name: BREADBOX_TLS_CA, value: /etc/breadbox/tls/ca.crt}
{{- end }}
{{- if .root.Values.tokens.enabled }}
- name: BREADBOX_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .secret }}, key: token}
{{- end }}
- {name: BREADBOX_HEARTBEAT_FILE, value: /tmp/heartbeat}
{{- if gt (int .part.gpu) 0 }}
- {name: BREADBOX_DEVICE, value: cuda}
{{- end }}
{{- with .part.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "breadbox.heartbeatProbe" -}}
exec: {command: ["python", "-m", "breadbox.transport.heartbeat"]}
initialDelaySeconds: 120
timeoutSeconds: 10
periodSeconds: 30
{{- end -}}
