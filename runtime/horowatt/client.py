# SPDX-License-Identifier: Apache-2.0
"""HTTP over the service's Unix socket, for agents and the command line (standard library only)."""

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, urlencode

from horowatt.errors import HorowattError, RetryLater

CONNECT_TIMEOUT_S = 5.0
RESPONSE_TIMEOUT_S = 60.0


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=RESPONSE_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(CONNECT_TIMEOUT_S)
        self.sock.connect(str(self._path))
        self.sock.settimeout(self.timeout)


class ServiceClient:
    """Calls the service. One object may be used for many calls, by one thread at a time."""

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path

    def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | Mapping[str, object] | None = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Return the body of the response.

        Raises:
            RetryLater: ``HW-NET-001`` when the service does not answer.
            HorowattError: the error that the service described, with its code.
        """
        data = json.dumps(body).encode() if isinstance(body, Mapping) else body
        target = quote(path) + (f"?{urlencode(query)}" if query else "")
        connection = _UnixConnection(self.socket_path)
        try:
            connection.request(
                method, target, body=data, headers={"content-type": "application/json", **(headers or {})}
            )
            response = connection.getresponse()
            payload = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()
        if response.status >= http.client.BAD_REQUEST:
            raise self._problem(response.status, payload)
        return payload

    def get_json(self, path: str, query: Mapping[str, str] | None = None) -> object:
        """Return the decoded JSON of a GET."""
        return json.loads(self.request("GET", path, query=query))

    def stream_lines(self, path: str, query: Mapping[str, str] | None = None) -> Iterator[str]:
        """Yield the lines of a streamed GET until the service ends it.

        Raises:
            RetryLater: ``HW-NET-001`` when the connection breaks.
        """
        target = quote(path) + (f"?{urlencode(query)}" if query else "")
        connection = _UnixConnection(self.socket_path)
        try:
            connection.request("GET", target)
            response = connection.getresponse()
            if response.status >= http.client.BAD_REQUEST:
                raise self._problem(response.status, response.read())
            for line in response:
                yield line.decode("utf-8", "replace").rstrip("\n")
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()

    def _unreachable(self, error: Exception) -> RetryLater:
        return RetryLater(
            "HW-NET-001",
            f"the Horowatt service does not answer on {self.socket_path}",
            because=str(error) or type(error).__name__,
            hint="start it with 'horowatt serve', or name its socket with --socket or HOROWATT_SOCKET",
            fields={"socket": str(self.socket_path)},
        )

    @staticmethod
    def _problem(status: int, payload: bytes) -> HorowattError:
        try:
            problem = json.loads(payload)
        except ValueError:
            problem = None
        if not isinstance(problem, dict):
            problem = {"title": f"the service answered with status {status}", "status": status}
        return HorowattError.from_problem(problem)
