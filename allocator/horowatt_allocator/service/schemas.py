# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests, checked at the edge; what a job may be is decided in ``decisions.admission``."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from horowatt.errors import InvalidInput
from horowatt.records import BatchRule, LauncherKind
from horowatt_allocator.records.jobs import JobRequest

_NoSpecial = Field(allow_inf_nan=False)
Number = Annotated[float, _NoSpecial]


class SubmitBody(BaseModel):
    """``POST /v1/jobs``. Who submits is not in here: the kernel says it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    tenant: str | None = Field(default=None, description="Default: the submitter's user name.")
    command: list[str] = Field(description="Argument vector; no shell ever sees it.")
    working_dir: str
    widths: str = Field(default="1", description="Legal widths, such as '1,2,4'.")
    environment: dict[str, str] = Field(default_factory=dict)
    virtual_env: str | None = None
    batch_rule: Annotated[BatchRule, Field(strict=False)] = BatchRule.PER_WORKER
    batch_size: int | None = None
    total_samples: int | None = None
    total_epochs: Number | None = None
    deadline_s: Number | None = Field(default=None, description="Unix time, seconds.")
    wall_time_limit_s: Number | None = None
    gpu_types: list[str] = Field(default_factory=list, description="Empty: all.")
    weight: Number = 1.0
    flexibility: Number = 0.0
    launcher: Annotated[LauncherKind, Field(strict=False)] = LauncherKind.HOROWATT

    def to_request(self, username: str) -> JobRequest:
        """Return the request for admission."""
        return JobRequest(
            name=self.name,
            tenant=username if self.tenant is None else self.tenant,
            command=tuple(self.command),
            working_dir=self.working_dir,
            widths=self.widths,
            launcher=self.launcher,
            environment=dict(self.environment),
            virtual_env=self.virtual_env,
            batch_rule=self.batch_rule,
            batch_size=self.batch_size,
            total_samples=self.total_samples,
            total_epochs=self.total_epochs,
            deadline_s=self.deadline_s,
            wall_time_limit_s=self.wall_time_limit_s,
            gpu_types=tuple(self.gpu_types),
            weight=self.weight,
            flexibility=self.flexibility,
        )


def parse_submit(body: bytes) -> SubmitBody:
    """Return the body of a submission.

    Raises:
        InvalidInput: ``HW-API-001`` with the offending fields.
    """
    try:
        return SubmitBody.model_validate_json(body)
    except ValidationError as error:
        fields = {
            ".".join(str(part) for part in item["loc"]) or "body": item["msg"]
            for item in error.errors(include_url=False, include_context=False, include_input=False)
        }
        raise InvalidInput(
            "HW-API-001",
            "this job cannot be read",
            because="; ".join(f"{name}: {message}" for name, message in fields.items()),
            hint="see 'horowatt submit --help' for what a job may say",
            fields=fields,
        ) from error
