{{- define "torchax-serve.labels" -}}
app.kubernetes.io/name: torchax-serve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "torchax-serve.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "torchax-serve.pod" -}}
metadata:
  labels:
    {{- include "torchax-serve.labels" . | nindent 4 }}
    app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
  {{- if .Values.metrics.annotations }}
  annotations: {prometheus.io/scrape: "true", prometheus.io/port: "8000", prometheus.io/path: /metrics}
  {{- end }}
spec:
  # --pre-stop, --drain-timeout, and some more.
  terminationGracePeriodSeconds: {{ add .Values.termination.preStop .Values.termination.drainTimeout 10 }}
  automountServiceAccountToken: false
  securityContext: {runAsNonRoot: true, runAsUser: 10001, fsGroup: 10001, seccompProfile: {type: RuntimeDefault}}
  {{- with .Values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: server
      image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      command: [/venv/bin/torchax-serve, serve]
      args:
        {{- with .Values.model }}
        - {{ . | quote }}
        {{- end }}
        {{- range .Values.args }}
        - {{ . | quote }}
        {{- end }}
        {{- if .Values.events.enabled }}
        - --kv-events-config={"enable_kv_cache_events":true,"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558"}
        {{- end }}
      env:
        - {name: TORCHAX_SERVE_HOST, value: 0.0.0.0}
        - {name: TORCHAX_SERVE_LOG_FORMAT, value: json}
        - {name: TORCHAX_SERVE_PRE_STOP, value: {{ .Values.termination.preStop | quote }}}
        - {name: TORCHAX_SERVE_DRAIN_TIMEOUT, value: {{ .Values.termination.drainTimeout | quote }}}
        - {name: TORCHAX_SERVE_METRICS_COMPAT, value: vllm}
        - {name: TORCHAX_SERVE_METRICS_WITHOUT_KEY, value: {{ .Values.metrics.withoutKey | quote }}}
        {{- if .Values.cache.enabled }}
        - {name: HOME, value: /cache}
        - {name: HF_HOME, value: /cache/huggingface}
        - {name: HF_HUB_OFFLINE, value: "0"}
        {{- end }}
        {{- if .Values.key.secret }}
        - name: TORCHAX_SERVE_API_KEY
          valueFrom: {secretKeyRef: {name: {{ .Values.key.secret | quote }}, key: {{ .Values.key.name | quote }}}}
        {{- end }}
        {{- if gt (int .Values.hosts) 1 }}
        - {name: TORCHAX_SERVE_COORDINATOR, value: $(LWS_LEADER_ADDRESS):8476}
        - {name: TORCHAX_SERVE_NUM_HOSTS, value: $(LWS_GROUP_SIZE)}
        - name: TORCHAX_SERVE_HOST_ID
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"}}
        {{- end }}
        {{- with .Values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - {name: http, containerPort: 8000}
        {{- if .Values.events.enabled }}
        - {name: events, containerPort: 5557}
        - {name: events-replay, containerPort: 5558}
        {{- end }}
        {{- if gt (int .Values.hosts) 1 }}
        - {name: coordinator, containerPort: 8476}
        - {name: hosts, containerPort: 8477}
        {{- end }}
      {{- if and .probes (eq (int .Values.hosts) 1) }}
      # Loading and compiling may take long; the process lives meanwhile.
      startupProbe: {httpGet: {path: /readyz, port: http}, periodSeconds: 5, failureThreshold: {{ div (add .Values.startup.timeout 4) 5 }}}
      readinessProbe: {httpGet: {path: /readyz, port: http}, periodSeconds: 2, timeoutSeconds: 2}
      livenessProbe: {httpGet: {path: /livez, port: http}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 3}
      {{- else if .probes }}
      # A leader that does not answer is asked no more; a process that has died ends all hosts.
      startupProbe: {httpGet: {path: /readyz, port: http}, periodSeconds: 5, failureThreshold: {{ div (add .Values.startup.timeout 4) 5 }}}
      readinessProbe: {httpGet: {path: /readyz, port: http}, periodSeconds: 2, timeoutSeconds: 2}
      {{- end }}
      resources:
        requests: {{- toYaml .Values.resources.requests | nindent 10 }}
        limits:
          {{- toYaml .Values.resources.limits | nindent 10 }}
          {{- if .Values.accelerator.resource }}
          {{ .Values.accelerator.resource }}: {{ .Values.accelerator.count | quote }}
          {{- end }}
      securityContext: {readOnlyRootFilesystem: true, allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if .Values.cache.enabled }}
        - {name: cache, mountPath: /cache}
        {{- end }}
  volumes:
    - {name: tmp, emptyDir: {}}
    {{- if not .Values.cache.enabled }}
    {{- else if .Values.cache.claim }}
    - {name: cache, persistentVolumeClaim: {claimName: {{ .Values.cache.claim | quote }}}}
    {{- else }}
    - {name: cache, emptyDir: {sizeLimit: {{ .Values.cache.sizeLimit | quote }}}}
    {{- end }}
{{- end }}
