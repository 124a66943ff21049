# SPDX-License-Identifier: Apache-2.0
"""The service as a real process: real socket, real database, real kernel credentials."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from horowatt import wire
from horowatt.client import ServiceClient
from horowatt.errors import HorowattError, InvalidInput, NeedsOperator, NotFound, RetryLater
from horowatt.records import (
    WIRE_VERSION,
    AgentOrders,
    AgentReport,
    EnergyInterval,
    EnergyMethod,
    GpuReport,
    JobReport,
    LauncherState,
    LauncherStatus,
    LeaseReport,
    StreamChunk,
)

NOBODY = 65534
START_TIMEOUT_S = 60.0
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user or mounts a file system")

INVENTORY = """
name = "lab"
[[node]]
name = "n1"
num_gpus = 2
[[node]]
name = "n2"
num_gpus = 2
"""
CONFIG = """
[policy]
agent_timeout_s = 2
[[tenant]]
name = "vision; $(x)"
users = ["*"]
[[tenant]]
name = "closed"
users = ["somebody-else"]
"""
SERVE = """
import sys
from pathlib import Path
from horowatt.errors import HorowattError
from horowatt_allocator.service.main import ServeConfig, run
folder, state, port, inventory = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
config = Path(sys.argv[5]) if sys.argv[5] else None
try:
    sys.exit(run(ServeConfig(state_dir=state, socket_path=folder / "s.sock", http_port=int(port),
                             inventory_path=inventory, config_path=config)))
except HorowattError as error:
    print(error, file=sys.stderr)
    sys.exit(125)
"""
BODY: dict[str, object] = {
    "name": "my job",
    "tenant": "vision; $(x)",
    "command": ["python", "train.py", "; rm -rf $HOME"],
    "working_dir": "/tmp",
    "widths": "1,2",
    "batch_size": 8,
}


@dataclass
class Service:
    """A service process with its folder."""

    folder: Path
    port: int = 0
    state_dir: Path | None = None
    process: subprocess.Popen[str] | None = None
    ready_line: str = ""
    config: str = CONFIG
    reports: dict[str, int] = field(default_factory=dict)

    @property
    def socket(self) -> Path:
        return self.folder / "s.sock"

    @property
    def state(self) -> Path:
        return self.state_dir or self.folder / "state"

    @property
    def client(self) -> ServiceClient:
        return ServiceClient(self.socket)

    @property
    def http_port(self) -> int:
        return int(self.ready_line.split("127.0.0.1:")[1].split(",")[0])

    def spawn(self) -> subprocess.Popen[str]:
        (self.folder / "lab.toml").write_text(INVENTORY)
        (self.folder / "config.toml").write_text(self.config)
        with (self.folder / "log").open("a") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-c", SERVE, str(self.folder), str(self.state), str(self.port)),
                    *(str(self.folder / "lab.toml"), str(self.folder / "config.toml")),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "HOROWATT_CHECK_INVARIANTS": "1"},
            )

    def start(self) -> None:
        self.process = self.spawn()
        assert self.process.stdout is not None
        self.ready_line = self.process.stdout.readline()
        assert self.ready_line.startswith("serving on "), self.log()
        assert str(self.process.pid) in self.ready_line

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None
        return code

    def restart(self) -> None:
        self.end(signal.SIGKILL)
        self.start()

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def get(self, path: str, **query: str) -> Any:
        return self.client.get_json(path, query)

    def submit(self, **changes: object) -> dict[str, Any]:
        headers = changes.pop("headers", None)
        body = {**BODY, **changes}
        payload = self.client.request("POST", "/v1/jobs", body=body, headers=headers)  # type: ignore[arg-type]
        document = json.loads(payload)
        assert isinstance(document, dict)
        return document

    def report(self, **changes: Any) -> AgentOrders:
        report = replace(agent_report(), sent_at_s=time.time(), **changes)
        body = wire.encode(report)
        return wire.decode(
            self.client.request("POST", f"/v1/agents/{report.node}/report", body=body), AgentOrders
        )


@contextlib.contextmanager
def service_in(folder: Path, **changes: Any) -> Iterator[Service]:
    folder.chmod(0o755)
    service = Service(folder, **changes)
    service.start()
    try:
        yield service
    finally:
        if service.process is not None:
            service.end(signal.SIGKILL)
    assert "Traceback" not in service.log(), service.log()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path that other users may enter."""
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def service(folder: Path) -> Iterator[Service]:
    """A running service."""
    with service_in(folder) as running:
        yield running


@pytest.fixture(scope="module")
def shared() -> Iterator[Service]:
    """A running service for tests that change nothing in it."""
    with tempfile.TemporaryDirectory(prefix="hw-") as name, service_in(Path(name)) as running:
        yield running


def refused(call: Callable[[], object], kind: type[HorowattError], code: str) -> HorowattError:
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.code == code, str(caught.value)
    return caught.value


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + START_TIMEOUT_S
    while not (value := condition()):
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.1)
    return value


def gpu(uuid: str) -> GpuReport:
    return GpuReport(
        uuid=uuid,
        nvml_index=int(uuid[-1]),
        gpu_type="h100",
        simulated=True,
        energy_j=100.0,
        power_w=70.0,
        limit_w=300.0,
        default_limit_w=300.0,
        min_limit_w=100.0,
        max_limit_w=300.0,
        can_set_limit=True,
        lost=False,
        sampled_at_s=time.time(),
    )


def agent_report() -> AgentReport:
    return AgentReport(
        wire_version=WIRE_VERSION,
        node="n1",
        agent_id="agent-1",
        sent_at_s=time.time(),
        isolated=False,
        gpus=(gpu("GPU-n1-0"), gpu("GPU-n1-1")),
        jobs=(),
        intervals=(),
        notes={"run_dir": "/run/horowatt"},
    )


def interval(
    seq: int, job_id: str | None = None, energy_j: float = 10.0, uuid: str = "GPU-n1-0"
) -> EnergyInterval:
    return EnergyInterval(
        seq=seq,
        gpu_uuid=uuid,
        gpu_type="h100",
        simulated=True,
        start_s=1000.0 + seq,
        end_s=1001.0 + seq,
        counter_start_j=energy_j * seq,
        counter_end_j=energy_j * (seq + 1),
        energy_j=energy_j,
        unmeasured="",
        method=EnergyMethod.COUNTER,
        job_id=job_id,
        lease_id=None if job_id is None else "lease",
        generation=0 if job_id is None else 1,
        attributable=True,
    )


def chunk(stream: str, offset: int, text: str) -> StreamChunk:
    return StreamChunk(stream=stream, offset=offset, next_offset=offset + len(text.encode()), text=text)


def job_report(job_id: str, *streams: StreamChunk, **changes: Any) -> JobReport:
    return replace(
        JobReport(job_id=job_id, generation_published=1, launcher=None, leases=(), streams=streams), **changes
    )


AS_NOBODY = """
import http.client, json, socket, sys
path, calls = sys.argv[1], json.loads(sys.argv[2])
answers = []
for method, target, body in calls:
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(path)
    connection.request(method, target, body=body, headers={"content-type": "application/json"})
    response = connection.getresponse()
    answers.append([response.status, response.read().decode()])
    connection.close()
print(json.dumps(answers))
"""


def as_nobody(service: Service, *calls: tuple[str, str, object]) -> list[tuple[int, str]]:
    """Call the service as another Unix user and return statuses and bodies."""
    sent = [
        (method, target, body if body is None or isinstance(body, str) else json.dumps(body))
        for method, target, body in calls
    ]
    done = subprocess.run(
        ["/usr/bin/python3", "-c", AS_NOBODY, str(service.socket), json.dumps(sent)],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [(status, text) for status, text in json.loads(done.stdout)]


def over_tcp(service: Service, method: str, path: str, **headers: str) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", service.http_port, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


# Jobs


def test_a_job_is_accepted_and_shown(service: Service) -> None:
    """A submitted job is stored as the kernel's caller, and found by id, start of id and name."""
    job = service.submit()
    assert job["phase"] == "queued"
    assert job["tenant"] == "vision; $(x)"
    assert job["command"] == BODY["command"]
    assert job["legal_widths"] == [1, 2]
    assert job["energy_j"] is None
    assert job["rate_per_s"] is None
    assert job["reason"]["sentence"]
    for ref in (job["job_id"], job["job_id"][:-1], "my job"):
        assert service.get(f"/v1/jobs/{ref}")["job_id"] == job["job_id"]
    assert [item["job_id"] for item in service.get("/v1/jobs")["jobs"]] == [job["job_id"]]
    assert service.get("/v1/jobs", tenant="other")["jobs"] == []
    explained = service.get(f"/v1/jobs/{job['job_id']}/explain")
    assert explained["job"]["job_id"] == job["job_id"]
    assert explained["queue_position"] == 1
    for document in (job, service.get("/v1/jobs"), explained):
        assert document["schema_version"] == 1


def test_an_ambiguous_name_is_refused(service: Service) -> None:
    """A name that two active jobs have is refused with their ids."""
    first, second = service.submit(), service.submit()
    error = refused(lambda: service.get("/v1/jobs/my job"), InvalidInput, "HW-API-011")
    assert first["job_id"] in error.because
    service.client.request("POST", f"/v1/jobs/{first['job_id']}/cancel")
    wait_for(lambda: service.get(f"/v1/jobs/{first['job_id']}")["phase"] == "cancelled", "the end of a job")
    assert service.get("/v1/jobs/my job")["job_id"] == second["job_id"]
    refused(lambda: service.get("/v1/jobs/nope"), NotFound, "HW-API-010")


def test_cancelling_is_idempotent(service: Service) -> None:
    """A queued job ends at once when cancelled; doing so again changes nothing; lists hide it."""
    job_id = service.submit()["job_id"]
    for _ in range(2):
        document = json.loads(service.client.request("POST", f"/v1/jobs/{job_id}/cancel"))
        assert document["phase"] == "cancelled"
    assert service.get("/v1/jobs")["jobs"] == []
    assert [job["job_id"] for job in service.get("/v1/jobs", all="true")["jobs"]] == [job_id]


def test_a_repeated_submission_makes_one_job(service: Service) -> None:
    """The same key and body give the same job, also after kill -9; another body is refused."""
    headers = {"idempotency-key": "k1"}
    first = service.submit(headers=headers)
    assert service.submit(headers=headers)["job_id"] == first["job_id"]
    service.restart()
    assert service.submit(headers=headers)["job_id"] == first["job_id"]
    error = refused(lambda: service.submit(headers=headers, name="other"), InvalidInput, "HW-SUB-020")
    assert first["job_id"] in error.because
    assert len(service.get("/v1/jobs", all="1")["jobs"]) == 1
    assert service.submit(headers={"idempotency-key": "k2"})["job_id"] != first["job_id"]


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"wdth": 4}, "HW-API-001", "wdth"),
        ({"uid": 0}, "HW-API-001", "uid"),
        ({"command": "python x.py"}, "HW-API-001", "command"),
        ({"batch_size": "8"}, "HW-API-001", "batch_size"),
        ({"batch_rule": "some"}, "HW-API-001", "batch_rule"),
        ({"environment": {"A": 1}}, "HW-API-001", "environment.A"),
    ],
)
def test_bad_bodies_are_refused(shared: Service, changes: dict[str, object], code: str, field: str) -> None:
    """A body that cannot be read is refused with the field; nothing is stored."""
    error = refused(lambda: shared.submit(**changes), InvalidInput, code)
    assert field in error.fields
    assert shared.get("/v1/jobs", all="1")["jobs"] == []


def test_bodies_that_are_no_jobs_are_refused(shared: Service) -> None:
    """Text that is no JSON, NaN, and a body that is too large are errors with codes."""

    def post(body: bytes) -> Callable[[], object]:
        return lambda: shared.client.request("POST", "/v1/jobs", body=body)

    refused(post(b"{"), InvalidInput, "HW-API-001")
    refused(post(b"[]"), InvalidInput, "HW-API-001")
    refused(post(json.dumps({**BODY, "weight": float("nan")}).encode()), InvalidInput, "HW-API-001")
    large = json.dumps({**BODY, "environment": {"A": "x" * (1 << 20)}}).encode()
    refused(post(large), InvalidInput, "HW-API-004")


def test_bad_addresses_and_queries_are_refused(service: Service) -> None:
    """An unknown address, method or query is a problem document with a code."""
    refused(lambda: service.get("/v2/jobs"), NotFound, "HW-API-003")
    refused(lambda: service.get("/v1/decisions", after="-1"), InvalidInput, "HW-API-002")
    refused(lambda: service.client.request("DELETE", "/v1/jobs"), HorowattError, "HW-API-005")
    job_id = service.submit()["job_id"]
    refused(lambda: service.get(f"/v1/jobs/{job_id}/logs", cursor="x"), InvalidInput, "HW-API-012")


def test_a_closed_tenant_is_refused(shared: Service) -> None:
    """Nobody submits for a tenant that does not list the user, or that does not exist."""
    for tenant in ("closed", "no such"):
        with pytest.raises(HorowattError) as caught:
            shared.submit(tenant=tenant)
        assert caught.value.http_status in {403, 404, 422}


def test_without_tenants_each_user_is_one(folder: Path) -> None:
    """Without configured tenants the submitter's user name is the tenant, before and after a restart."""
    with service_in(folder, config="") as service:
        body = {key: value for key, value in BODY.items() if key != "tenant"}
        job = json.loads(service.client.request("POST", "/v1/jobs", body=body))
        assert job["tenant"] == job["user"]
        with pytest.raises(HorowattError):
            service.submit(tenant="vision; $(x)")
        service.restart()
        assert service.get(f"/v1/jobs/{job['job_id']}")["tenant"] == job["user"]
        assert json.loads(service.client.request("POST", "/v1/jobs", body=body))["tenant"] == job["user"]


# Other users


@pytest.mark.root
@needs_root
def test_another_user_sees_nothing_of_a_job(service: Service) -> None:
    """Another user neither sees nor touches a job: not by listing, name, id, log, decision or energy."""
    job_id = service.submit(name="secret name")["job_id"]
    report = job_report(job_id, chunk("lease/x", 0, "secret line\n"))
    service.report(jobs=(report,), intervals=(interval(1, job_id),))
    answers = as_nobody(
        service,
        ("GET", "/v1/jobs?all=1", None),
        ("GET", f"/v1/jobs/{job_id}", None),
        ("GET", "/v1/jobs/secret%20name", None),
        ("GET", f"/v1/jobs/{job_id}/explain", None),
        ("GET", f"/v1/jobs/{job_id}/logs", None),
        ("POST", f"/v1/jobs/{job_id}/cancel", None),
        ("GET", "/v1/decisions", None),
        ("GET", "/v1/energy", None),
        ("GET", f"/v1/energy?job={job_id}", None),
        ("GET", "/v1/nodes", None),
        ("GET", "/v1/cluster", None),
    )
    assert [status for status, _ in answers] == [200, 404, 404, 404, 404, 404, 200, 200, 404, 200, 200]
    for (status, text), hides_id in zip(
        answers, [True, *[False] * 5, *[True] * 2, False, True, True], strict=True
    ):
        assert "secret" not in text.replace("secret%20name", "").replace("'secret name'", "") or status == 404
        assert "secret line" not in text
        assert "vision" not in text
        if hides_id:
            assert job_id not in text
    energy = json.loads(answers[7][1])
    assert energy["jobs"] == []
    assert energy["total"]["energy_j"] == 10.0
    assert [line["tenant"] for line in energy["tenants"]] == ["(others)"]
    assert service.get(f"/v1/jobs/{job_id}")["phase"] != "cancelled"


@pytest.mark.root
@needs_root
def test_another_user_has_jobs_of_its_own(service: Service) -> None:
    """A job belongs to the user whom the kernel names, whatever the body says; its key is its own."""
    [(status, text)] = as_nobody(service, ("POST", "/v1/jobs", BODY))
    assert status == 201
    job = json.loads(text)
    assert job["user"] == "nobody"
    [(_, listed), (cancelled, _)] = as_nobody(
        service, ("GET", "/v1/jobs", None), ("POST", f"/v1/jobs/{job['job_id']}/cancel", None)
    )
    assert [item["job_id"] for item in json.loads(listed)["jobs"]] == [job["job_id"]]
    assert cancelled == 200
    assert [item["user"] for item in service.get("/v1/jobs", all="1")["jobs"]] == ["nobody"]


@pytest.mark.root
@needs_root
def test_another_user_is_no_agent(shared: Service) -> None:
    """Only root, the service's user and configured users are believed as agents."""
    report = wire.encode(agent_report()).decode()
    [(status, text)] = as_nobody(shared, ("POST", "/v1/agents/n1/report", report))
    assert status == 403
    assert json.loads(text)["code"] == "HW-NODE-005"
    assert shared.get("/v1/nodes")["nodes"][0]["state"] == "unseen"


@pytest.mark.root
@needs_root
def test_configured_users_are_agents_and_operators(folder: Path) -> None:
    """agent_users may report, operators see everything."""
    config = 'operators = ["nobody"]\nagent_users = ["nobody"]\n' + CONFIG
    with service_in(folder, config=config) as service:
        job_id = service.submit()["job_id"]
        [(reported, _), (seen, _)] = as_nobody(
            service,
            ("POST", "/v1/agents/n1/report", wire.encode(agent_report()).decode()),
            ("GET", f"/v1/jobs/{job_id}", None),
        )
        assert (reported, seen) == (200, 200)


@pytest.mark.root
@needs_root
def test_a_socket_in_the_state_folder_can_be_reached(folder: Path) -> None:
    """With the socket inside the state folder others get through to it, but not to the database."""
    with service_in(folder, state_dir=folder) as service:
        assert as_nobody(service, ("GET", "/healthz", None)) == [(200, '{"status":"ok"}')]
        for path in folder.glob("*.sqlite*"):
            assert path.stat().st_mode & 0o077 == 0
        assert folder.stat().st_mode & 0o777 == 0o711


# Anonymous callers


def test_loopback_is_read_only(service: Service) -> None:
    """Over TCP the cluster's totals can be read; jobs, logs and all changes are refused with a hint."""
    job_id = service.submit()["job_id"]
    service.report()
    for path in ("/healthz", "/readyz", "/v1/nodes", "/v1/cluster"):
        status, document = over_tcp(service, "GET", path)
        assert status == 200
        assert job_id not in json.dumps(document)
        assert "vision" not in json.dumps(document)
    assert over_tcp(service, "GET", "/v1/cluster")[1]["num_gpus"] == 2
    for method, path in (
        ("GET", "/v1/jobs"),
        ("GET", f"/v1/jobs/{job_id}/logs"),
        ("POST", "/v1/jobs"),
        ("GET", "/v1/energy"),
        ("GET", "/openapi.json"),
        ("DELETE", "/anything"),
        ("POST", "/v1/agents/n1/report"),
        ("GET", "/v1/../v1/jobs"),
    ):
        status, document = over_tcp(service, method, path)
        assert status == 403, path
        assert document["code"] == "HW-API-008"
        assert "socket" in document["title"]
    assert over_tcp(service, "POST", "/v1/nodes")[0] in {403, 405}


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("LOCALHOST:80", True),
        ("127.0.0.1:9", True),
        ("[::1]:9", True),
        ("::1", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("192.168.0.1", False),
        ("", False),
    ],
)
def test_foreign_host_names_are_refused(shared: Service, host: str, allowed: bool) -> None:
    """A web page cannot read the port under a name of its own."""
    status, document = over_tcp(shared, "GET", "/v1/cluster", host=host)
    assert (status == 200) == allowed
    if not allowed:
        assert document["code"] == "HW-API-007"


def test_health_is_on_the_socket_too(shared: Service) -> None:
    """Health and readiness are answered on both listeners."""
    assert shared.get("/healthz") == {"status": "ok"}
    assert shared.get("/readyz")["ready"] is True
    assert "/v1/jobs" in shared.get("/openapi.json")["paths"]


# Agents


def test_an_agent_gets_orders(service: Service) -> None:
    """A node with GPUs gets the queued job as an order with everything that is needed to start it."""
    job_id = service.submit()["job_id"]
    service.report()
    orders = wait_for(lambda: (found := service.report()).jobs and found, "orders")
    [order] = orders.jobs
    assert order.job_id == job_id
    assert order.run
    assert order.launcher_here
    assert order.spec.command == tuple(BODY["command"])  # type: ignore[arg-type]
    assert (order.spec.uid, order.spec.gid) == (os.getuid(), os.getgid())
    assert {lease.node for lease in order.slots.leases} == {"n1"}
    assert orders.report_after_s > 0
    job = service.get(f"/v1/jobs/{job_id}")
    assert job["phase"] == "running"
    assert job["width"] == len(order.slots.leases)
    assert job["simulated"] is True
    assert job["job_dir"] == f"/run/horowatt/jobs/{job_id}"
    assert job["discovery_script"] == f"/run/horowatt/jobs/{job_id}/discover.sh"
    node = service.get("/v1/nodes")["nodes"][0]
    assert (node["name"], node["state"]) == ("n1", "up")
    assert {item["job_id"] for item in node["gpus"]} >= {job_id}
    assert "run_dir" not in node["notes"]
    decisions = service.get("/v1/decisions", after="0")
    assert any(change["job_id"] == job_id for item in decisions["decisions"] for change in item["changes"])
    last = decisions["last"]
    assert all(item["number"] > last for item in service.get("/v1/decisions", after=str(last))["decisions"])
    [start] = job["resizes"]
    assert (start["kind"], start["width"], start["outcome"]) == ("start", job["width"], None)
    assert "resizes" not in service.get("/v1/jobs")["jobs"][0]
    explained = service.get(f"/v1/jobs/{job_id}/explain")
    assert explained["job"]["resizes"] == [start]
    assert explained["plan"]["column"]["width"] == job["width"]
    assert explained["story"]


def test_wrong_agents_are_refused(service: Service) -> None:
    """Unknown nodes, newer agents, second agents and copied identities are refused, each with a code."""
    refused(lambda: service.report(node="n9"), InvalidInput, "HW-NODE-001")
    refused(lambda: service.report(wire_version=WIRE_VERSION + 1), InvalidInput, "HW-NODE-002")
    mismatch = wire.encode(agent_report())
    refused(
        lambda: service.client.request("POST", "/v1/agents/n2/report", body=mismatch),
        InvalidInput,
        "HW-NODE-001",
    )
    refused(
        lambda: service.client.request("POST", "/v1/agents/n1/report", body=b"{}"),
        InvalidInput,
        "HW-WIRE-001",
    )
    service.report()
    refused(lambda: service.report(agent_id="agent-2"), RetryLater, "HW-NODE-003")
    refused(lambda: service.report(node="n2"), InvalidInput, "HW-NODE-004")
    wait_for(lambda: accepted(service, "agent-2"), "the first agent to be taken for gone")


def accepted(service: Service, agent_id: str) -> bool:
    try:
        service.report(agent_id=agent_id)
    except RetryLater:
        return False
    return True


def test_logs_arrive_once_and_in_order(service: Service) -> None:
    """Repeated and overlapping pieces show each line once; the orders say where to go on."""
    job_id = service.submit()["job_id"]
    wait_for(lambda: service.report().jobs, "orders")

    def send(*streams: StreamChunk) -> dict[str, int]:
        orders = service.report(jobs=(job_report(job_id, *streams),))
        [order] = [order for order in orders.jobs if order.job_id == job_id]
        return dict(order.streams)

    assert send(chunk("lease/a", 0, "one\ntw")) == {"lease/a": 6}
    assert send(chunk("lease/a", 0, "one\ntwo\n")) == {"lease/a": 6}
    assert send(chunk("lease/a", 6, "o\n"), chunk("launcher", 0, "up\n")) == {"lease/a": 8, "launcher": 3}
    assert send(chunk("lease/a", 20, "later\n"), chunk("events", 0, "{}\n"))["lease/a"] == 8
    page = service.get(f"/v1/jobs/{job_id}/logs")
    assert [(line["stream"], line["text"]) for line in page["lines"]] == [
        ("lease/a", "one"),
        ("lease/a", "two"),
        ("launcher", "up"),
    ]
    assert {line["node"] for line in page["lines"]} == {"n1"}
    assert page["ended"] is False
    assert service.get(f"/v1/jobs/{job_id}/logs", cursor=page["cursor"])["lines"] == []
    assert len(service.get(f"/v1/jobs/{job_id}/logs", stream="all")["lines"]) == 4
    events = service.get(f"/v1/jobs/{job_id}/logs", stream="events")["lines"]
    assert [line["text"] for line in events] == ["{}"]


def test_a_waiting_reader_is_woken(service: Service) -> None:
    """A request that waits for the log is answered when a line comes, not when its time is over."""
    job_id = service.submit()["job_id"]
    wait_for(lambda: service.report().jobs, "orders")
    with socket.socket(socket.AF_UNIX) as reader:
        reader.settimeout(60)
        reader.connect(str(service.socket))
        reader.sendall(f"GET /v1/jobs/{job_id}/logs?wait_s=30 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        time.sleep(0.5)
        began = time.monotonic()
        service.report(jobs=(job_report(job_id, chunk("lease/a", 0, "news\n")),))
        answer = reader.recv(65536).decode()
        took_s = time.monotonic() - began
    assert "news" in answer
    # The wait itself is 30 s, so that anything well below it shows the wake-up.
    assert took_s < 20


def test_the_log_of_a_job_that_never_ran_has_an_end(service: Service) -> None:
    """Following the log of a cancelled job ends at once."""
    job_id = service.submit()["job_id"]
    service.client.request("POST", f"/v1/jobs/{job_id}/cancel")
    page = service.get(f"/v1/jobs/{job_id}/logs", wait_s="30")
    assert (page["lines"], page["ended"]) == ([], True)


def test_energy_adds_up(service: Service) -> None:
    """Repeated intervals are booked once; jobs, tenants and idle add up to the devices' counters."""
    job_id = service.submit()["job_id"]
    intervals = (interval(1), interval(2, job_id), interval(3, job_id))
    assert service.report(intervals=intervals[:2]).acked_seq == 2
    assert service.report(intervals=intervals[:2]).acked_seq == 2
    assert service.report(intervals=intervals).acked_seq == 3
    report = service.get("/v1/energy")
    assert report["cluster"] == "lab"
    assert report["simulated"] is True
    assert report["total"]["energy_j"] == pytest.approx(30.0)
    assert report["total"]["kwh"] == pytest.approx(30.0 / 3.6e6)
    assert report["total"]["coverage"] == 1.0
    assert report["idle"]["energy_j"] == pytest.approx(10.0)
    assert report["devices_j"] == pytest.approx(30.0)
    assert report["sum_error"] == pytest.approx(0.0)
    [job] = report["jobs"]
    assert (job["job_id"], job["energy"]["energy_j"]) == (job_id, pytest.approx(20.0))
    [tenant] = report["tenants"]
    assert (tenant["tenant"], tenant["energy"]["energy_j"]) == ("vision; $(x)", pytest.approx(20.0))
    assert service.get(f"/v1/jobs/{job_id}")["energy_j"] == pytest.approx(20.0)
    other = service.submit()["job_id"]
    assert [item["job_id"] for item in service.get("/v1/energy", job=job_id)["jobs"]] == [job_id]
    assert [item["job_id"] for item in service.get("/v1/energy", job=other)["jobs"]] in ([], [other])
    assert service.get("/v1/energy", tenant="vision; $(x)")["tenants"] == [tenant]
    later = service.get("/v1/energy", start_s="1003", end_s="2000")
    assert later["total"]["energy_j"] == pytest.approx(10.0)


# Restart


def running_job(service: Service) -> tuple[str, tuple[str, ...]]:
    """Bring a job to training on n1 and return its id and its lease ids."""
    job_id = service.submit()["job_id"]
    orders = wait_for(lambda: (found := service.report()).jobs and found, "orders")
    lease_ids = tuple(lease.lease_id for lease in orders.jobs[0].slots.leases)
    service.report(jobs=(training(job_id, lease_ids),), intervals=(interval(1), interval(2, job_id)))
    return job_id, lease_ids


def training(
    job_id: str, lease_ids: tuple[str, ...], state: LauncherState = LauncherState.RUNNING
) -> JobReport:
    now_s = time.time()
    ended = state is not LauncherState.RUNNING
    return JobReport(
        job_id=job_id,
        generation_published=1,
        launcher=LauncherStatus(
            job_id=job_id,
            attempt=1,
            state=state,
            pid=1,
            generation_applied=1,
            exit_code=0 if ended else None,
            code="",
            message="",
            updated_at_s=now_s,
        ),
        leases=tuple(
            LeaseReport(
                lease_id=lease_id,
                held=not ended,
                started=True,
                rank=rank,
                world_size=len(lease_ids),
                steps=10,
                samples=80,
                epoch_samples=1000,
                first_step_end_s=now_s - 5,
                last_step_end_s=now_s,
                exit_code=0 if ended else None,
                sampled_at_s=now_s,
            )
            for rank, lease_id in enumerate(lease_ids)
        ),
    )


VOLATILE = ("silent_for_s",)


def everything(service: Service, job_id: str) -> dict[str, Any]:
    nodes = service.get("/v1/nodes")["nodes"]
    energy = service.get("/v1/energy")
    return {
        "job": service.get(f"/v1/jobs/{job_id}"),
        "gpus": [node["gpus"] for node in nodes],
        "energy": {key: energy[key] for key in ("total", "idle", "jobs", "tenants", "devices")},
        "log": service.get(f"/v1/jobs/{job_id}/logs"),
    }


def test_kill_9_changes_nothing(service: Service) -> None:
    """After kill -9 the job, its leases, the ledger and the log are what they were, and it goes on."""
    job_id, lease_ids = running_job(service)
    report = replace(training(job_id, lease_ids), streams=(chunk("lease/a", 0, "one\ntwo"),))
    service.report(jobs=(report,), intervals=(interval(3, job_id),))
    before = everything(service, job_id)
    assert before["job"]["phase"] == "running"
    service.restart()
    assert everything(service, job_id) == before
    orders = service.report(jobs=(report,), intervals=(interval(1), interval(3, job_id), interval(4, job_id)))
    assert orders.acked_seq == 4
    [order] = [order for order in orders.jobs if order.job_id == job_id]
    assert (order.run, order.attempt, order.slots.generation) == (True, 1, 1)
    assert {lease.lease_id for lease in order.slots.leases} == set(lease_ids)
    assert order.streams == {"lease/a": 7}
    energy = service.get("/v1/energy")
    assert energy["total"]["energy_j"] == pytest.approx(40.0)
    done = replace(
        training(job_id, lease_ids, LauncherState.FINISHED), streams=(chunk("lease/a", 7, "\nthree"),)
    )
    service.report(jobs=(done,))
    wait_for(
        lambda: (
            service.report(jobs=(training(job_id, lease_ids, LauncherState.FINISHED),))
            and service.get(f"/v1/jobs/{job_id}")["phase"] == "finished"
        ),
        "the job to finish",
    )
    job = service.get(f"/v1/jobs/{job_id}")
    assert job["exit_code"] == 0
    page = wait_for(
        lambda: (found := service.get(f"/v1/jobs/{job_id}/logs"))["ended"] and found, "the end of the log"
    )
    assert [line["text"] for line in page["lines"]] == ["one", "two", "three"]


def test_kill_9_at_any_moment_loses_no_acknowledged_job(folder: Path) -> None:
    """Every job that was acknowledged is there after any kill, and no key made two."""
    acknowledged: list[str] = []
    for round_ in range(4):
        with service_in(folder) as service:
            listed = [job["job_id"] for job in service.get("/v1/jobs", all="1")["jobs"]]
            assert set(acknowledged) <= set(listed)
            assert len(set(listed)) == len(listed) <= len(acknowledged) + round_
            assert service.process is not None
            # Kills from the side, at a moment that differs from round to round.
            delay_s = 0.05 + 0.13 * round_
            killer = subprocess.Popen(["sh", "-c", f"sleep {delay_s}; kill -9 {service.process.pid}"])
            with contextlib.suppress(HorowattError):
                while True:
                    key = {"idempotency-key": f"k{len(acknowledged)}"}
                    acknowledged.append(service.submit(headers=key)["job_id"])
            assert killer.wait() == 0
    assert acknowledged


# Starting and ending


def failed_start(service: Service) -> str:
    process = service.spawn()
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.read() == ""
    assert process.wait(START_TIMEOUT_S) == 125
    assert "Traceback" not in service.log()
    return service.log()


def test_a_second_service_is_refused(shared: Service) -> None:
    """A second service on one state folder ends with an error that names the first; that one goes on."""
    assert shared.process is not None
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        second = Service(Path(name), state_dir=shared.state)
        text = failed_start(second)
    assert "error[HW-SRV-002]" in text
    assert f"pid {shared.process.pid}" in text
    assert shared.get("/healthz") == {"status": "ok"}


def test_a_taken_port_and_socket_are_refused(shared: Service) -> None:
    """A taken port and a socket that somebody answers on each end the start with what to do."""
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        text = failed_start(Service(Path(name), port=shared.http_port))
        assert "error[HW-SRV-003]" in text
        assert str(shared.http_port) in text
        assert not (Path(name) / "s.sock").exists()
    text = failed_start(Service(shared.folder, state_dir=shared.folder / "other"))
    assert "error[HW-SRV-005]" in text
    assert shared.get("/healthz") == {"status": "ok"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_orderly_while_somebody_waits(service: Service, number: signal.Signals) -> None:
    """A signal ends the service with 0 although a reader waits for a log; the socket file is gone."""
    job_id = service.submit()["job_id"]
    with socket.socket(socket.AF_UNIX) as reader:
        reader.settimeout(60)
        reader.connect(str(service.socket))
        reader.sendall(f"GET /v1/jobs/{job_id}/logs?wait_s=30 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        wait_for(lambda: service.get("/healthz"), "an answer")
        assert service.end(number) == 0
        assert b'"lines":[]' in reader.recv(65536)
    assert not service.socket.exists()
    service.start()
    assert service.get(f"/v1/jobs/{job_id}")["job_id"] == job_id


def test_the_state_is_private(shared: Service) -> None:
    """No other user can read what the service keeps."""
    assert shared.state.stat().st_mode & 0o077 == 0
    for path in shared.state.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path


# A full disk


@pytest.mark.root
@needs_root
def test_a_full_disk_refuses_and_recovers(folder: Path) -> None:
    """With a full disk submissions and reports are refused, nothing is believed, and it recovers."""
    tiny = folder / "tiny"
    tiny.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tiny)], check=True)
    try:
        with service_in(folder, state_dir=tiny) as service:
            job_id, lease_ids = running_job(service)
            with (tiny / "ballast").open("wb") as stream, contextlib.suppress(OSError):
                while True:
                    os.write(stream.fileno(), b"x" * 4096)
            sent, acked = 2, 2
            error: HorowattError | None = None
            while error is None:
                sent += 500
                batch = tuple(interval(seq, job_id) for seq in range(3, sent))
                try:
                    acked = service.report(jobs=(training(job_id, lease_ids),), intervals=batch).acked_seq
                except RetryLater as caught:
                    error = caught
            assert error.code == "HW-DISK-001"
            refused(
                lambda: [service.submit(environment={"A": "x" * 100_000}) for _ in range(20)],
                NeedsOperator,
                "HW-DISK-001",
            )
            jobs = len(service.get("/v1/jobs", all="1")["jobs"])
            refused(lambda: service.get("/readyz"), RetryLater, "HW-SRV-009")
            assert service.get(f"/v1/jobs/{job_id}")["phase"] == "running"
            (tiny / "ballast").unlink()
            assert service.report(jobs=(training(job_id, lease_ids),), intervals=batch).acked_seq == sent - 1
            assert service.submit()["phase"] == "queued"
            assert service.get("/readyz")["ready"] is True
            before = everything(service, job_id)
            service.restart()
            assert everything(service, job_id) == before
            assert before["energy"]["total"]["energy_j"] == pytest.approx(10.0 * (sent - 1))
            assert len(service.get("/v1/jobs", all="1")["jobs"]) == jobs + 1
            assert acked >= 2
    finally:
        subprocess.run(["umount", "-l", str(tiny)], check=True)
