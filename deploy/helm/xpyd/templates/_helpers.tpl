{{- define "xpyd.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- /* 40 characters: the longest suffix and a pod's own still fit into 63. */ -}}
{{- define "xpyd.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "xpyd.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "xpyd.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "xpyd.selector" -}}
app.kubernetes.io/name: {{ include "xpyd.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "xpyd.labels" -}}
{{ include "xpyd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "xpyd.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "xpyd.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- /* Routers that read the API have an account of their own, so that no worker has what it may. */ -}}
{{- define "xpyd.routerAccount" -}}
{{- if .Values.router.engines -}}
{{- include "xpyd.fullname" . }}-router
{{- else -}}
{{- include "xpyd.serviceAccount" . -}}
{{- end -}}
{{- end -}}

{{- define "xpyd.fleetSecret" -}}
{{- default (printf "%s-fleet" (include "xpyd.fullname" .)) .Values.fleet.existingSecret -}}
{{- end -}}

{{- define "xpyd.embedded" -}}
{{- if and (not .Values.fleet.nats.url) .Values.fleet.nats.embedded }}true{{ end -}}
{{- end -}}

{{- /* An image, of (dict "root" $ "over" what goes before). */ -}}
{{- define "xpyd.image" -}}
{{- $image := mergeOverwrite (deepCopy .root.Values.image) .over -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default .root.Chart.AppVersion $image.tag }}
{{- end -}}
{{- end -}}

{{- define "xpyd.fleetTLS" -}}
tls_cert: /etc/xpyd/tls/tls.crt
tls_key: /etc/xpyd/tls/tls.key
tls_ca: /etc/xpyd/tls/ca.crt
{{- end -}}

{{- /* A router's configuration: what the chart knows, and over it what the user says. */ -}}
{{- define "xpyd.routerConfig" -}}
{{- $full := include "xpyd.fullname" . -}}
{{- $fleet := dict -}}
{{- if include "xpyd.embedded" . -}}
{{- $routes := list -}}
{{- range $n := until (min 2 (int .Values.router.replicas) | int) -}}
{{- $routes = append $routes (printf "nats://%s-router-%d.%s-routers.%s.svc:6222" $full $n $full $.Release.Namespace) -}}
{{- end -}}
{{- $fleet = dict "listen" "0.0.0.0:4222" "cluster_listen" "0.0.0.0:6222" "cluster_routes" $routes -}}
{{- end -}}
{{- if .Values.fleet.tls.secretName -}}
{{- $fleet = merge $fleet (fromYaml (include "xpyd.fleetTLS" .)) -}}
{{- end -}}
{{- $p := .Values.prefill.autoscaling -}}
{{- $d := .Values.decode.autoscaling -}}
{{- $budget := add (mul (int $p.maxReplicas) (max 1 (int .Values.prefill.gpus))) (mul (int $d.maxReplicas) (max 1 (int .Values.decode.gpus))) -}}
{{- $planner := dict "mode" "advise" "budget" $budget "prefill" (dict "min" $p.minReplicas "max" $p.maxReplicas) "decode" (dict "min" $d.minReplicas "max" $d.maxReplicas) -}}
{{- $config := dict "listen" "0.0.0.0:8000" "admin_listen" "0.0.0.0:8001" "data" "/dev/shm/xpyd" "join_file" "/etc/xpyd/fleet/join-url" "log" (dict "format" "json") "planner" $planner -}}
{{- if $fleet }}{{ $_ := set $config "fleet" $fleet }}{{ end -}}
{{- if .Values.router.tls.secretName }}{{ $_ := merge $config (dict "tls_cert" "/etc/xpyd/public/tls.crt" "tls_key" "/etc/xpyd/public/tls.key") }}{{ end -}}
{{- if .Values.router.apiKeysSecret.name }}{{ $_ := set $config "api_keys_file" (printf "/etc/xpyd/keys/%s" .Values.router.apiKeysSecret.key) }}{{ end -}}
{{- if .Values.router.engines }}{{ $_ := set $config "discovery" (dict "kubernetes" (dict "services" .Values.router.engines)) }}{{ end -}}
{{- toYaml (mergeOverwrite $config (deepCopy .Values.router.config)) -}}
{{- end -}}

{{- /* A worker's, of (dict "root" $ "role" "prefill"). */ -}}
{{- define "xpyd.workerConfig" -}}
{{- $values := .root.Values -}}
{{- $role := index $values .role -}}
{{- $config := dict "join_file" "/etc/xpyd/fleet/join-url" "listen" "0.0.0.0:8100" "kv_listen" "0.0.0.0:8200" "log" (dict "format" "json") -}}
{{- $_ := set $config "kv_events" (dict "listen" "0.0.0.0:8300" "replay" "0.0.0.0:8400") -}}
{{- $_ := set $config "drain_timeout" (printf "%ds" (int $values.workers.drainSeconds)) -}}
{{- with $values.model.name }}{{ $_ := set $config "model" . }}{{ end -}}
{{- with $values.model.servedName }}{{ $_ := set $config "served_name" . }}{{ end -}}
{{- if $role.gpus -}}
{{- $_ := merge $config (dict "device" "cuda" "tensor_parallel" $role.gpus) -}}
{{- else -}}
{{- $_ := set $config "device" "cpu" -}}
{{- end -}}
{{- if $values.fleet.tls.secretName }}{{ $_ := set $config "fleet" (fromYaml (include "xpyd.fleetTLS" .root)) }}{{ end -}}
{{- toYaml (mergeOverwrite $config (deepCopy $values.workers.config) (deepCopy $role.config)) -}}
{{- end -}}

{{- /* Volumes and mounts that all pods have. A file of the fleet is followed: what the Secret says is in force without a restart. */ -}}
{{- define "xpyd.volumes" -}}
- name: config
  configMap:
    name: {{ include "xpyd.fullname" .root }}-{{ .role }}
- name: fleet
  secret:
    secretName: {{ include "xpyd.fleetSecret" .root }}
    defaultMode: 0440
    items:
      - {key: join-url, path: join-url}
{{- with .root.Values.fleet.tls.secretName }}
- name: tls
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{- define "xpyd.mounts" -}}
- {name: config, mountPath: /etc/xpyd/config, readOnly: true}
- {name: fleet, mountPath: /etc/xpyd/fleet, readOnly: true}
{{- if .root.Values.fleet.tls.secretName }}
- {name: tls, mountPath: /etc/xpyd/tls, readOnly: true}
{{- end }}
{{- end -}}

{{- /* Pods of this release by their component. */ -}}
{{- define "xpyd.peers" -}}
- podSelector:
    matchLabels: {{- include "xpyd.selector" .root | nindent 6 }}
    matchExpressions:
      - {key: app.kubernetes.io/component, operator: In, values: {{ .components | toJson }}}
{{- end -}}
