"""A stand-in for MLflow's server: answers what a client asks of it, and notes every request as a line of JSON.

A program of its own, so that a test can kill it: mlflow_server.py PORT LOG. It prints its port once it listens.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

INFO = {
    "run_id": "0f", "run_uuid": "0f", "experiment_id": "1", "status": "RUNNING", "start_time": 0,
    "artifact_uri": "mlflow-artifacts:/1/0f/artifacts", "lifecycle_stage": "active",
}  # fmt: skip
ANSWERS: dict[str, dict[str, Any]] = {
    "experiments/search": {"experiments": []},
    "experiments/create": {"experiment_id": "1"},
    "runs/create": {"run": {"info": INFO, "data": {}}},
    "runs/get": {"run": {"info": INFO, "data": {}}},
    "runs/update": {"run_info": INFO},
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    log: Path

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        body = self.read()
        said = {"path": path, "size": len(body), "body": json.loads(body) if body[:1] == b"{" else None}
        with self.log.open("a") as file:
            file.write(json.dumps(said) + "\n")
        missing = path.endswith("get-by-name")
        found: dict[str, Any] = next((a for end, a in ANSWERS.items() if path.endswith(end)), {})
        if missing:
            found = {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none"}
        text = json.dumps(found).encode()
        self.send_response(404 if missing else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        whole = b""
        while size := int(self.rfile.readline(), 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return whole

    do_GET = do_POST = do_PUT = do_PATCH = answer

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


if __name__ == "__main__":
    Handler.log = Path(sys.argv[2])
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
