# SPDX-License-Identifier: Apache-2.0
"""Errors people can act on.

    HorowattError
    |-- InvalidInput           what was asked cannot be done as written: change the input
    |-- NotAllowed             the caller may not do this: ask an operator
    |-- NotFound               no such job, node, tenant or file
    |-- RetryLater             nothing is wrong with the request: the same call may succeed later
    |-- NeedsOperator          the installation or the machine must be mended first
    `-- MeasurementUnavailable a reading could not be had; never replaced by zero

Subclasses say what the caller does next. Each raise gives a stable ``code`` (documented in
``docs/errors.md``), what happened, why, and what to try.
"""

from collections.abc import Mapping


class HorowattError(Exception):
    """Root of every error that Horowatt raises on purpose.

    Attributes:
        code: Stable identifier such as ``"HW-INV-003"``; never reused for another meaning.
        message: What happened, in one sentence.
        because: Why, or an empty string when the message already says it.
        hint: What to do next.
        fields: Offending inputs by name, safe to show to the caller.
    """

    http_status = 500

    def __init__(
        self,
        code: str,
        message: str,
        *,
        because: str = "",
        hint: str = "",
        fields: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.because = because
        self.hint = hint
        self.fields: dict[str, str] = dict(fields or {})

    def __str__(self) -> str:
        lines = [f"error[{self.code}]: {self.message}"]
        if self.because:
            lines.append(f"  because: {self.because}")
        if self.hint:
            lines.append(f"  try: {self.hint}")
        return "\n".join(lines)

    def to_problem(self) -> dict[str, object]:
        """Return the RFC 9457 problem document of this error."""
        return {
            "type": f"urn:horowatt:error:{self.code}",
            "title": self.message,
            "status": self.http_status,
            "code": self.code,
            "detail": self.because,
            "hint": self.hint,
            "fields": self.fields,
        }

    @staticmethod
    def from_problem(problem: Mapping[str, object]) -> "HorowattError":
        """Rebuild the error that a service described as a problem document."""
        status = problem.get("status")
        fields = problem.get("fields")
        kind = _BY_STATUS.get(status if isinstance(status, int) else 500, HorowattError)
        return kind(
            str(problem.get("code", "HW-SRV-000")),
            str(problem.get("title", "the service reported an error without a title")),
            because=str(problem.get("detail", "")),
            hint=str(problem.get("hint", "")),
            fields={str(k): str(v) for k, v in fields.items()} if isinstance(fields, dict) else {},
        )


class InvalidInput(HorowattError):
    """What was asked cannot be done as written."""

    http_status = 422


class NotAllowed(HorowattError):
    """The caller may not do this."""

    http_status = 403


class NotFound(HorowattError):
    """The named thing does not exist, or is not visible to the caller."""

    http_status = 404


class RetryLater(HorowattError):
    """The same call may succeed later."""

    http_status = 503


class NeedsOperator(HorowattError):
    """The installation or the machine must be mended first."""

    http_status = 507


class MeasurementUnavailable(HorowattError):
    """A reading could not be had."""

    http_status = 500


_BY_STATUS: dict[int, type[HorowattError]] = {
    kind.http_status: kind
    for kind in (MeasurementUnavailable, InvalidInput, NotAllowed, NotFound, RetryLater, NeedsOperator)
}
