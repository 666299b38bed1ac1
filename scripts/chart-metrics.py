#!/usr/bin/env python3
"""An external metrics API for scripts/chart-test: xpyd_planner_wanted_workers as Prometheus and its adapter would serve it.

Usage: chart-metrics.py PORT CERT KEY VALUES, where VALUES is a file of {"decode": 3, "prefill": 1}, read for each request.
"""

import http.server
import json
import ssl
import sys
import urllib.parse

PORT, CERT, KEY, VALUES = sys.argv[1:]
BASE = "/apis/external.metrics.k8s.io/v1beta1"


class API(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        url = urllib.parse.urlparse(self.path)
        labels = dict(part.split("=", 1) for part in urllib.parse.parse_qs(url.query).get("labelSelector", [""])[0].split(",") if "=" in part)
        if url.path == BASE:
            return self.answer({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "external.metrics.k8s.io/v1beta1",
                                "resources": [{"name": "xpyd_planner_wanted_workers", "namespaced": True, "kind": "ExternalMetricValueList", "verbs": ["get"]}]})
        series = {"namespace": "serving", "app_kubernetes_io_instance": "xpyd"}
        items = []
        # As Prometheus: a selector that names another release, or a label that no series has, finds nothing.
        if url.path == BASE + "/namespaces/serving/xpyd_planner_wanted_workers" and all(labels.get(k, v) == v for k, v in series.items()) and set(labels) <= {"role", *series}:
            with open(VALUES, encoding="utf-8") as f:
                wanted = json.load(f)
            items = [{"metricName": "xpyd_planner_wanted_workers", "metricLabels": {"role": role}, "timestamp": "2026-01-01T00:00:00Z", "value": str(n)}
                     for role, n in wanted.items() if labels.get("role", role) == role]
        return self.answer({"kind": "ExternalMetricValueList", "apiVersion": "external.metrics.k8s.io/v1beta1", "metadata": {}, "items": items})

    def answer(self, body):
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


server = http.server.ThreadingHTTPServer(("0.0.0.0", int(PORT)), API)
tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
tls.load_cert_chain(CERT, KEY)
server.socket = tls.wrap_socket(server.socket, server_side=True)
server.serve_forever()
