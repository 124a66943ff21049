# SPDX-License-Identifier: Apache-2.0
"""Which jobs are taken: what cannot be meant or can never run is refused at once, with what would do."""

import math
import re
from collections.abc import Mapping

from horowatt.errors import InvalidInput, NotAllowed
from horowatt.records import BatchRule
from horowatt_allocator.records.cluster import State, Tenant
from horowatt_allocator.records.jobs import JobRequest, JobSpec

EVERYBODY = "*"
"""Stands in a tenant's list of users for all of them."""
MAX_WIDTH = 65_536
MAX_LEGAL_WIDTHS = 4096
MAX_NAME_CHARS = 128
MAX_WEIGHT = 1000.0
_MOST_SHOWN = 12
_RANGE = re.compile(r"(\d{1,5})\s*-\s*(\d{1,5})(?:\s*:\s*(\d{1,5}|pow2))?", re.ASCII)
_LIST = re.compile(r"\d{1,5}(?:\s*,\s*\d{1,5})*", re.ASCII)


def admit(
    request: JobRequest,
    state: State,
    *,
    job_id: str,
    uid: int,
    gid: int,
    username: str,
    now: float,
) -> JobSpec:
    """Return the job a request describes.

    Args:
        request: What the submitter asks for.
        state: Tenants, and the GPUs there are.
        job_id: Unique for ever.
        uid: The submitter, as the kernel named it; likewise ``gid`` and ``username``.
        gid: See ``uid``.
        username: See ``uid``.
        now: Unix time, seconds.

    Raises:
        InvalidInput: ``HW-SPEC-001`` command, ``002`` name, ``003`` folder, ``004`` environment, ``005``
            widths as text, ``006`` widths that can never fit, ``007`` batch, ``008`` total work, ``009``
            deadline or wall time, ``010`` weight or flexibility, ``011`` GPU type, ``012`` tenant unknown.
        NotAllowed: ``HW-SPEC-013`` when the user may not submit for the tenant.
    """
    _check_command(request)
    _check_place(request)
    _check_environment(request.environment)
    widths = parse_widths(request.widths)
    tenant = _tenant(request.tenant, state.tenants, username)
    _check_types(request, state)
    _check_fit(request, widths, tenant, state)
    _check_batch(request, widths)
    _check_work(request)
    _check_times(request, now)
    _check_shares(request)
    return JobSpec(
        job_id=job_id,
        name=request.name,
        tenant=request.tenant,
        uid=uid,
        gid=gid,
        username=username,
        launcher=request.launcher,
        command=request.command,
        environment=dict(request.environment),
        working_dir=request.working_dir,
        virtual_env=request.virtual_env,
        legal_widths=widths,
        batch_rule=request.batch_rule,
        batch_size=request.batch_size,
        total_samples=request.total_samples,
        total_epochs=request.total_epochs,
        deadline_s=request.deadline_s,
        wall_time_limit_s=request.wall_time_limit_s,
        gpu_types=request.gpu_types,
        weight=request.weight,
        flexibility=request.flexibility,
        submitted_at_s=now,
    )


def parse_widths(text: str) -> tuple[int, ...]:
    """Return the legal widths that a text names, ascending.

    ``4`` one width, ``1,2,4`` a list, ``1-8`` a range, ``2-16:2`` a range with a step (2, 4, ...),
    ``1-64:pow2`` the powers of two in a range.

    Raises:
        InvalidInput: ``HW-SPEC-005``.
    """
    text = text.strip()
    if ranged := _RANGE.fullmatch(text):
        widths = _range(text, int(ranged[1]), int(ranged[2]), ranged[3])
    elif _LIST.fullmatch(text):
        widths = tuple(sorted(int(width) for width in text.split(",")))
    else:
        raise _widths(text, "it is neither a width, nor a list, nor a range")
    if len(set(widths)) != len(widths):
        raise _widths(text, "a width stands there twice")
    if widths[0] < 1 or widths[-1] > MAX_WIDTH:
        raise _widths(text, f"each width must be from 1 to {MAX_WIDTH}")
    if len(widths) > MAX_LEGAL_WIDTHS:
        raise _widths(text, f"it names {len(widths)} widths, at most {MAX_LEGAL_WIDTHS} are possible")
    return widths


def _range(text: str, low: int, high: int, step: str | None) -> tuple[int, ...]:
    if low > high:
        raise _widths(text, f"the minimum {low} is above the maximum {high}")
    if step == "pow2":
        widths = tuple(1 << n for n in range(high.bit_length()) if low <= 1 << n <= high)
        if not widths:
            raise _widths(text, f"there is no power of two from {low} to {high}")
        return widths
    if step is not None and int(step) < 1:
        raise _widths(text, "the step must be 1 or more")
    return tuple(range(low, high + 1, int(step or 1)))


def _widths(text: str, because: str) -> InvalidInput:
    return _invalid(
        "HW-SPEC-005",
        f"{text!r} does not name legal widths",
        because,
        "write 4, or 1,2,4, or 1-8, or 2-16:2 (steps of 2), or 1-64:pow2 (powers of two)",
        "widths",
    )


def _invalid(code: str, message: str, because: str, hint: str, field: str) -> InvalidInput:
    return InvalidInput(code, message, because=because, hint=hint, fields={field: because or message})


def _check_command(request: JobRequest) -> None:
    if not request.command or not request.command[0].strip():
        hint = "end with it: horowatt submit ... -- python train.py"
        raise _invalid("HW-SPEC-001", "there is no command to run", "", hint, "command")
    if any("\0" in word for word in request.command):
        because = "no program can be given a NUL character"
        raise _invalid("HW-SPEC-001", "the command cannot be run", because, "remove the NUL", "command")
    name = request.name
    if not name.strip() or len(name) > MAX_NAME_CHARS or any(not char.isprintable() for char in name):
        because = f"it must have 1 to {MAX_NAME_CHARS} printable characters"
        raise _invalid("HW-SPEC-002", "this job name cannot be used", because, "choose another name", "name")


def _check_place(request: JobRequest) -> None:
    for field, path in (("working_dir", request.working_dir), ("virtual_env", request.virtual_env)):
        if path is None:
            continue
        if not path.startswith("/") or "\0" in path:
            because = f"{path!r} is not an absolute path"
            message = f"the job has no usable {field.replace('_', ' ')}"
            raise _invalid("HW-SPEC-003", message, because, "give a path that begins with /", field)


def _check_environment(environment: Mapping[str, str]) -> None:
    for name, value in environment.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            because = "a name must not be empty, and neither '=' in it nor NUL anywhere is possible"
            message = f"the environment variable {name!r} cannot be set"
            raise _invalid("HW-SPEC-004", message, because, "rename it, or leave it out", "environment")


def _tenant(name: str, tenants: Mapping[str, Tenant], username: str) -> Tenant:
    own = sorted(t.name for t in tenants.values() if EVERYBODY in t.users or username in t.users)
    allowed = f"{username} may submit for: {', '.join(own)}" if own else f"{username} has no tenant"
    hint = f"--tenant {own[0]}" if own else "ask an operator to add the user to a tenant"
    if name not in tenants:
        raise _invalid("HW-SPEC-012", f"there is no tenant {name!r}", allowed, hint, "tenant")
    if name not in own:
        message = f"{username} may not submit for tenant {name!r}"
        raise NotAllowed("HW-SPEC-013", message, because=allowed, hint=hint, fields={"tenant": name})
    return tenants[name]


def _check_types(request: JobRequest, state: State) -> None:
    known = _gpus_by_type(state)
    if known is None:
        return
    unknown = [name for name in request.gpu_types if name not in known]
    if unknown:
        because = f"the cluster has {', '.join(sorted(known)) or 'no GPUs'}"
        message = f"there is no GPU type {unknown[0]!r}"
        raise _invalid("HW-SPEC-011", message, because, "leave --gpu-type out to accept all", "gpu_types")


def _gpus_by_type(state: State) -> dict[str, int] | None:
    """Return the GPUs of the whole cluster by type; None while some node has not told its own."""
    counts: dict[str, int] = {}
    for node in state.nodes.values():
        if node.gpus:
            for gpu in node.gpus:
                counts[gpu.gpu_type] = counts.get(gpu.gpu_type, 0) + 1
        elif node.spec.gpu_type is not None and node.spec.num_gpus is not None:
            counts[node.spec.gpu_type] = counts.get(node.spec.gpu_type, 0) + node.spec.num_gpus
        elif node.last_seen_s is None:
            return None
    return counts


def _check_fit(request: JobRequest, widths: tuple[int, ...], tenant: Tenant, state: State) -> None:
    known = _gpus_by_type(state)
    if tenant.gpu_quota is not None and widths[0] > tenant.gpu_quota:
        because = f"the quota of tenant {tenant.name!r} is {tenant.gpu_quota}"
        raise _never_fits(widths[0], because, tenant.gpu_quota)
    if known is None:
        return
    usable = {t: n for t, n in known.items() if not request.gpu_types or t in request.gpu_types}
    most = max(usable.values(), default=0)
    if widths[0] > most:
        have = ", ".join(f"{count} {name}" for name, count in sorted(usable.items())) or "no GPUs"
        raise _never_fits(widths[0], f"a job runs on GPUs of one type, and there are {have}", most)


def _never_fits(width: int, because: str, most: int) -> InvalidInput:
    message = f"the narrowest width {width} can never fit"
    hint = f"a minimum of at most {most} fits" if most else "wait until the cluster has GPUs"
    return _invalid("HW-SPEC-006", message, because, hint, "widths")


def _check_batch(request: JobRequest, widths: tuple[int, ...]) -> None:
    size = request.batch_size
    if size is None:
        return
    if size < 1:
        because = f"{size} is not a number of samples"
        raise _invalid("HW-SPEC-007", "the batch cannot be used", because, "give 1 or more", "batch_size")
    if request.batch_rule is not BatchRule.TOTAL:
        return
    bad = [width for width in widths if size < width]
    if bad:
        good = [str(width) for width in widths if size >= width]
        shown = ",".join(good[:_MOST_SHOWN])
        because = f"{size} samples are not enough for {bad[0]} workers"
        hint = f"--widths {shown}" if good else "change the batch, or fix it per worker"
        raise _invalid("HW-SPEC-007", "the total batch does not fit every width", because, hint, "batch_size")


def _check_work(request: JobRequest) -> None:
    samples, epochs = request.total_samples, request.total_epochs
    if samples is not None and epochs is not None:
        because = "samples and epochs exclude each other"
        raise _invalid("HW-SPEC-008", "the total work is given twice", because, "keep one", "total_epochs")
    bad_samples = samples is not None and samples < 1
    if bad_samples or not _positive(epochs):
        field = "total_samples" if bad_samples else "total_epochs"
        because = "it must be a positive number"
        raise _invalid("HW-SPEC-008", "this total work is none", because, "leave it out if unknown", field)


def _check_times(request: JobRequest, now: float) -> None:
    deadline_s = request.deadline_s
    if deadline_s is not None and not (math.isfinite(deadline_s) and deadline_s > now):
        late = f"it passed {now - deadline_s:,.0f} s ago" if math.isfinite(deadline_s) else "it is no time"
        raise _invalid("HW-SPEC-009", "the deadline cannot be met", late, "give a later one", "deadline_s")
    if not _positive(request.wall_time_limit_s):
        because = "it must be a positive number of seconds"
        message = "the wall-time limit cannot be used"
        raise _invalid("HW-SPEC-009", message, because, "leave it out for none", "wall_time_limit_s")


def _check_shares(request: JobRequest) -> None:
    weight, flexibility = request.weight, request.flexibility
    if not 0 < weight <= MAX_WEIGHT:
        because = f"it must be above 0 and at most {MAX_WEIGHT:g}"
        raise _invalid(
            "HW-SPEC-010", f"the weight {weight:g} cannot be used", because, "1 is usual", "weight"
        )
    if not 0 <= flexibility <= 1:
        message = f"the flexibility {flexibility:g} cannot be used"
        because = "it is a share of the rate, from 0 to 1"
        raise _invalid("HW-SPEC-010", message, because, "0.1 lets a tenth go", "flexibility")


def _positive(value: float | None) -> bool:
    return value is None or (math.isfinite(value) and value > 0)
