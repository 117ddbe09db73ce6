{{- /* The default values of groups, which a group that is null gets: one of which every line is a comment. */}}
{{- define "kvstrata.groups" -}}
image: {registry: localhost, repository: kvstrata-operator, pullPolicy: IfNotPresent}
sidecar: {image: {repository: kvstrata-sidecar}}
redis: {image: {repository: kvstrata-redis}}
receipts: {keyDays: 365}
kms: {audience: kvstrata-kms}
serviceAccount: {create: true}
rbac: {create: true, aggregateToDefaultRoles: true, readNodes: false}
resources: {requests: {cpu: 100m, memory: 192Mi}, limits: {memory: 512Mi}}
podDisruptionBudget: {enabled: true}
networkPolicy: {enabled: true}
metrics: {serviceMonitor: {enabled: false, interval: 30s}, prometheusRule: {enabled: false}}
podLabels: {}
affinity: {}
uninstall: {check: true, releaseObjects: false}
{{- end }}

{{- /* Gives groups that are null their defaults. Each template that reads values begins with it. */}}
{{- define "kvstrata.defaults" -}}
{{- /* A user that is null is the platform's. `helm upgrade --reuse-values` from a chart without this value leaves it out, with the
others that came with it. */}}
{{- if not (or (hasKey $.Values "childLabels") (hasKey $.Values "childAnnotations") (hasKey $.Values "runAsUser")) }}{{ $_ := set $.Values "runAsUser" 65532 }}{{ end }}
{{- range $name, $group := include "kvstrata.groups" . | fromYaml }}
{{- $given := get $.Values $name }}
{{- if not (kindIs "map" $given) }}{{ $_ := set $.Values $name $group }}{{ $given = $group }}{{ end }}
{{- range $part, $default := $group }}
{{- if and (kindIs "map" $default) (not (kindIs "map" (get $given $part))) }}{{ $_ := set $given $part $default }}{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvstrata.fullname" -}}
{{- /* Names of releases may have dots, names of Services may not. */}}
{{- $release := .Release.Name | replace "." "-" }}
{{- $name := ternary $release (printf "%s-kvstrata" $release) (contains "kvstrata" $release) }}
{{- default $name .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "kvstrata.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "kvstrata.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name is needed when serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- /* Gates admit the operator by the first two of these labels: they cannot be overridden. */}}
{{- define "kvstrata.selectorLabels" -}}
app.kubernetes.io/name: kvstrata
app.kubernetes.io/component: operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvstrata.labels" -}}
{{ include "kvstrata.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: kvstrata
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- /* Takes {image, root}: an image as one string. A registry holds all of them, or each repository names its own. */}}
{{- define "kvstrata.image" -}}
{{- with .root.Values.image.registry }}{{ . }}/{{ end }}{{ .image.repository -}}
{{- if .image.digest }}@{{ .image.digest }}{{ else }}:{{ default .root.Chart.AppVersion .image.tag }}{{ end }}
{{- end }}

{{- /* The namespaces to watch, as a JSON list; not meaningful with clusterWide. The release's own is never served: watched by
itself, so that objects there are refused by name. */}}
{{- define "kvstrata.namespaces" -}}
{{- if has .Release.Namespace .Values.watchNamespaces }}
{{- fail (printf "watchNamespaces: %s is the release's own namespace, which is never served: delete its objects of kvstrata.io while the former release serves it, then leave it out" .Release.Namespace) }}
{{- end }}
{{- if .Values.watchNamespaces }}{{ .Values.watchNamespaces | sortAlpha | toJson }}{{ else }}{{ list .Release.Namespace | toJson }}{{ end }}
{{- end }}

{{- /* Where the operator's pods may run, as fields of a pod's spec in JSON; empty if anywhere. Its Jobs run there, too. */}}
{{- define "kvstrata.placement" -}}
{{- $placement := pick .Values "nodeSelector" "tolerations" "priorityClassName" }}
{{- $_ := set $placement "affinity" (pick .Values.affinity "nodeAffinity") }}
{{- range $name, $value := $placement }}
{{- if not $value }}{{ $_ := unset $placement $name }}{{ end }}
{{- end }}
{{- if $placement }}{{ toJson $placement }}{{ end }}
{{- end }}

{{- define "kvstrata.subject" -}}
kind: ServiceAccount
name: {{ include "kvstrata.serviceAccountName" . }}
namespace: {{ .Release.Namespace }}
{{- end }}

{{- /* Not the labels of the operator's pods: Service, disruption budget and gates select those. */}}
{{- define "kvstrata.uninstallLabels" -}}
{{ include "kvstrata.labels" . | fromYaml | merge (dict "app.kubernetes.io/component" "uninstall") | toYaml }}
{{- end }}

{{- /* Annotations of the uninstall hook; takes the weight. A refused one stays, with its log. */}}
{{- define "kvstrata.uninstallHook" -}}
helm.sh/hook: pre-delete
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}
