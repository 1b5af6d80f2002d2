"""Ray's Jobs API over HTTP; nothing of ray is imported.

The paths and bodies are those of ray 2.60 (``ray/dashboard/modules/job/job_head.py``), which have
not changed since 2.9.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from diloco_cloud.errors import ConfigError

DEFAULT_ADDRESS: Final = "http://127.0.0.1:8265"
#: Seconds for one request. The server waits 20 for an agent of its own.
TIMEOUT_S: Final = 30.0
#: How the dashboard names nodes that somebody has started by hand, instead of an autoscaler.
_NODE_WITHOUT_A_TYPE: Final = re.compile(r"node_?[0-9a-fA-F]{40,}")


class UnreachableError(Exception):
    """No answer, or none that means anything: nothing is known of what was done."""


class RefusedError(Exception):
    """An answer, and it is no."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(_last_line(text) or f"HTTP {status}")
        self.status = status
        self.text = text


@dataclass(frozen=True)
class JobsApi:
    """Requests to one cluster.

    Attributes:
        address: "http://host:8265", without a path.
    """

    address: str

    def submit(self, body: Mapping[str, Any]) -> str:
        """Submit a job; its submission id.

        Raises:
            UnreachableError, RefusedError: see there; a refused id may be one that is taken.
        """
        answer = self._request("POST", "/api/jobs/", body)
        return str(answer["submission_id"])

    def jobs(self) -> dict[str, dict[str, Any]]:
        """All submitted jobs that the cluster remembers, by submission id."""
        return {
            job["submission_id"]: job
            for job in self._request("GET", "/api/jobs/")
            if job.get("submission_id")
        }

    def job(self, submission_id: str) -> dict[str, Any] | None:
        """One job; None if the cluster does not know it."""
        return self._find("GET", submission_id)

    def logs(self, submission_id: str) -> str:
        """All that a job has written; "" if it has not, or is not known."""
        answer = self._find("GET", submission_id, "/logs")
        return "" if answer is None else str(answer["logs"])

    def stop(self, submission_id: str) -> None:
        """Ask a job to end; it takes a while."""
        self._find("POST", submission_id, "/stop")

    def nodes(self) -> tuple[list[dict[str, float]], bool]:
        """What each kind of node has, and whether there may be others when they are asked for.

        None at all until the cluster has told its monitor, some seconds after its start.
        """
        status = self._request("GET", "/api/cluster_status")["data"]["clusterStatus"]
        # Not "usage", whose keys the dashboard has put in camel case.
        kinds = (status.get("loadMetricsReport") or {}).get("nodeTypes") or []
        names = (status.get("autoscalerReport") or {}).get("activeNodes") or {}
        may_grow = not all(_NODE_WITHOUT_A_TYPE.fullmatch(name) for name in names)
        return [dict(resources) for resources, _ in kinds], may_grow

    def _find(self, method: str, submission_id: str, path: str = "") -> dict[str, Any] | None:
        try:
            return dict(self._request(method, f"/api/jobs/{quote(submission_id)}{path}"))
        except RefusedError as error:
            if error.status == 404:
                return None
            raise

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            self.address + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **_own_headers()},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            if error.code in (429, 502, 503, 504):  # a proxy's, or a head that is starting
                raise UnreachableError(f"{self.address} answers {error.code}") from None
            raise RefusedError(error.code, text) from None
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "reason", None) or error
            raise UnreachableError(f"{self.address} cannot be reached: {why}") from None
        except ValueError:
            raise UnreachableError(f"{self.address} is not a Ray dashboard") from None


def find_address(address: str | None) -> str:
    """Where the dashboard is: as given, else as Ray's own command looks for it.

    Raises:
        ConfigError: it is no HTTP address.
    """
    found = address or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT_ADDRESS
    if "://" not in found:
        found = f"http://{found}"
    if not found.startswith(("http://", "https://")):
        raise ConfigError(
            f"{found} is not the address of a Ray dashboard",
            fix="Use its HTTP address, such as http://head:8265.",
        )
    if "@" in found:
        raise ConfigError(
            "the address of a Ray dashboard holds credentials, and is stored with the run",
            fix="Put them in RAY_JOB_HEADERS, or a token in RAY_AUTH_TOKEN.",
        )
    return found.rstrip("/")


def _own_headers() -> dict[str, str]:
    """Credentials, from the variables that Ray's own command reads; never kept.

    Raises:
        ConfigError: ``RAY_JOB_HEADERS`` is not a JSON object.
    """
    headers = {}
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if not token and path:
        try:
            token = Path(path).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"RAY_AUTH_TOKEN_PATH cannot be read: {error.strerror}") from None
    if token:
        headers["Authorization"] = f"Bearer {token}"
    given = os.environ.get("RAY_JOB_HEADERS")
    if given:
        try:
            headers |= {str(name): str(value) for name, value in json.loads(given).items()}
        except (ValueError, AttributeError):
            raise ConfigError(
                "RAY_JOB_HEADERS is not a JSON object", fix="""Write '{"Name": "value"}'."""
            ) from None
    return headers


def _last_line(text: str) -> str:
    """What a traceback of the server's comes down to."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" .")]
    return lines[-1] if lines else ""
