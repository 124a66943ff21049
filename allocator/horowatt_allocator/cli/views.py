# SPDX-License-Identifier: Apache-2.0
"""The service's answers as the commands read them.

Absent fields read as None, so that a command works with a service that is a little older or newer;
an answer that is no JSON object at all is an error.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from horowatt.client import ServiceClient
from horowatt.errors import HorowattError
from horowatt_allocator.reports.figures import printable

ENDED_PHASES = frozenset({"finished", "failed", "cancelled"})


def send(
    client: ServiceClient,
    method: str,
    path: str,
    *,
    body: Mapping[str, object] | None = None,
    query: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the JSON object that the service answers.

    Raises:
        HorowattError: the service's own error, or ``HW-CLI-010`` when the answer is no JSON object.
    """
    payload = client.request(method, path, body=body, query=query, headers=headers)
    try:
        document = json.loads(payload)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise HorowattError(
            "HW-CLI-010",
            f"the service's answer to {method} {path} cannot be understood",
            because="it is not a JSON object",
            hint=f"check that {client.socket_path} belongs to a Horowatt service of this version",
        )
    return document


def items(document: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the objects in a list of the document; empty when it is absent."""
    value = document.get(key)
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def text_of(document: Mapping[str, Any], key: str) -> str | None:
    """Return a text of the document that is safe to show; None when it is absent."""
    value = document.get(key)
    return None if value is None else printable(str(value))


def number_of(document: Mapping[str, Any], key: str) -> float | None:
    """Return a number of the document; None when it is absent."""
    value = document.get(key)
    return None if isinstance(value, bool) or not isinstance(value, int | float) else float(value)


def whole_of(document: Mapping[str, Any], key: str) -> int | None:
    """Return a whole number of the document; None when it is absent."""
    value = number_of(document, key)
    return None if value is None else int(value)


def reason_of(document: Mapping[str, Any], key: str = "reason") -> tuple[str, str]:
    """Return code and sentence of a reason; empty texts when it is absent."""
    value = document.get(key)
    if not isinstance(value, dict):
        return "", ""
    return text_of(value, "code") or "", text_of(value, "sentence") or ""


@dataclass(frozen=True, slots=True)
class JobView:
    """One job as the service shows it; ``document`` is the whole answer."""

    document: dict[str, Any]

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "JobView":
        """Return the view of a job, whether it stands alone or under ``job``."""
        inner = document.get("job")
        return cls(inner if isinstance(inner, dict) else document)

    @property
    def job_id(self) -> str:
        """Its id."""
        return str(self.document.get("job_id", ""))

    @property
    def shown_name(self) -> str:
        """Its name, safe to show."""
        return text_of(self.document, "name") or ""

    @property
    def shown_tenant(self) -> str:
        """Its tenant, safe to show."""
        return text_of(self.document, "tenant") or ""

    @property
    def phase(self) -> str:
        """Where it is in its life."""
        return text_of(self.document, "phase") or "unknown"

    @property
    def ended(self) -> bool:
        """Tell whether nothing more will happen to it."""
        return self.phase in ENDED_PHASES

    @property
    def width(self) -> int:
        """Slots it holds."""
        return whole_of(self.document, "width") or 0

    @property
    def target_width(self) -> int:
        """Slots that the latest plan gives it."""
        target = whole_of(self.document, "target_width")
        return self.width if target is None else target

    @property
    def exit_code(self) -> int | None:
        """Exit code of its script; None while it has none."""
        return whole_of(self.document, "exit_code")

    @property
    def reason_code(self) -> str:
        """Stable code of why it is as it is."""
        return reason_of(self.document)[0]

    @property
    def reason_text(self) -> str:
        """Why it is as it is, for people."""
        code, sentence = reason_of(self.document)
        return sentence or code
