# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of a job as its workers, another tenant and a real Horovod meet it."""

import base64
import http.client
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from horowatt.elastic import rendezvous
from horowatt.errors import InvalidInput, NotAllowed, RetryLater

TOKEN = rendezvous.new_token()
LOOPBACK = "127.0.0.1"
PATIENCE_S = 150.0
"""Only how long a broken test waits; nothing is asserted about time."""

STRANGER = """
import encodings.idna, http.client, json, os, pwd, sys
stranger = pwd.getpwnam("nobody")
os.setgroups([])
os.setgid(stranger.pw_gid)
os.setuid(stranger.pw_uid)
port, requests = int(sys.argv[1]), json.load(sys.stdin)
answers = []
for verb, path, body, headers in requests:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(verb, path, body, headers)
    response = connection.getresponse()
    answers.append([verb, path, response.status, response.read().decode()])
print(json.dumps(answers))
"""


class Meeting:
    """Horovod's own driver behind the server, with two workers that have not come yet."""

    def __init__(self) -> None:
        from horovod.runner.elastic.discovery import FixedHosts
        from horovod.runner.elastic.driver import ElasticDriver
        from horovod.runner.elastic.rendezvous import create_rendezvous_handler

        self.server = rendezvous.make_server(LOOPBACK, TOKEN)
        self.driver = ElasticDriver(self.server, FixedHosts({"a": 1, "b": 1}), 2, 2)
        self.port = self.server.start(create_rendezvous_handler(self.driver))
        self._end = threading.Event()
        self.driver.start(2, self._work)

    def _work(self, *_: object) -> tuple[int, float]:
        self._end.wait()
        return 0, time.time()

    def ready(self) -> int:
        return int(self.driver._worker_registry.count("READY"))

    def close(self) -> None:
        self.driver.stop()
        self._end.set()


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    made = Meeting()
    yield made
    made.close()


@pytest.fixture
def server() -> Iterator[Any]:
    made = rendezvous.make_server(LOOPBACK, TOKEN)
    made.start()
    yield made
    made.stop()


def _ask(port: int, verb: str, path: str, body: bytes | None = None, token: str = TOKEN) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=PATIENCE_S)
    connection.request(verb, path, body, {"X-Horowatt-Token": token})
    response = connection.getresponse()
    return response.status, response.read()


def _port(server: Any) -> int:
    return int(server._httpd.server_address[1])


def _environment(monkeypatch: pytest.MonkeyPatch, port: int, token: str) -> None:
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", LOOPBACK)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(port))
    monkeypatch.setenv("HOROWATT_RENDEZVOUS_TOKEN", token)


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def _bomb(path: Path) -> bytes:
    return base64.b64encode(pickle.dumps(_Bomb(path)))


# --- another tenant


@pytest.mark.root
def test_another_user_learns_changes_and_runs_nothing(meeting: Meeting, tmp_path: Path) -> None:
    """Every verb of another local user is refused: no key, no READY, no pickle, no deletion."""
    assert _ask(meeting.port, "PUT", "/global/0", b"address of rank 0")[0] == 200
    bomb = _bomb(tmp_path / "run").decode()
    requests = [
        [verb, path, body, headers]
        for headers in ({}, {"X-Horowatt-Token": ""}, {"X-Horowatt-Token": rendezvous.new_token()})
        for verb, path, body in (
            ("GET", "/worker_addresses/a:0", None),
            ("GET", "/rank_and_size/a:0", None),
            ("GET", "/global/0", None),
            ("PUT", "/worker_addresses/a:0", bomb),
            ("PUT", "/global/0", "another address"),
            ("PUT", "/global/1", "x" * 200_000),
            ("DELETE", "/global/0", None),
            ("HEAD", "/etc/passwd", None),
            ("POST", "/global/0", bomb),
            ("OPTIONS", "/", None),
            ("BREW", "/pot", None),
        )
    ]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", STRANGER, str(meeting.port)],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        cwd="/",
        env={},
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert [answer[2] for answer in answers] == [403] * len(requests), answers
    assert not any("address" in answer[3] or TOKEN in answer[3] for answer in answers)
    assert meeting.server.refused == len(requests)
    assert meeting.ready() == 0
    assert meeting.driver._worker_clients == {}
    assert not (tmp_path / "run").exists()
    assert _ask(meeting.port, "GET", "/global/0") == (200, b"address of rank 0")


def test_with_the_token_workers_meet(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the token keys are put and got, and both workers get their places once both have come."""
    _environment(monkeypatch, meeting.port, TOKEN)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    answers: dict[str, bytes] = {}

    def come(lease_id: str) -> None:
        answers[lease_id] = rendezvous.fetch(f"rank_and_size/{lease_id}:0")

    threads = [threading.Thread(target=come, args=(lease_id,)) for lease_id in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(answer.split(b",")[:2] for answer in answers.values()) == [[b"0", b"2"], [b"1", b"2"]]
    assert _ask(meeting.port, "PUT", "/global/0", b"\x00\xff")[0] == 200
    assert rendezvous.fetch("/global/0") == b"\x00\xff"
    late = threading.Timer(0.1, _ask, (meeting.port, "PUT", "/global/1", b"late"))
    late.start()
    # Asked for before it is there, it is waited for rather than denied.
    assert _ask(meeting.port, "GET", "/global/1") == (200, b"late")
    late.join()
    with pytest.raises(RetryLater, match="no answer") as caught:
        rendezvous.fetch("global/7")
    assert caught.value.code == "HW-RDV-004"


def test_a_worker_that_is_refused_or_alone_is_told_so(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong token and a launcher that is gone are two errors with what to do."""
    port = _port(server)
    _environment(monkeypatch, port, "not the token")
    with pytest.raises(NotAllowed, match="refused") as caught:
        rendezvous.fetch("rank_and_size/a:0")
    assert caught.value.code == "HW-RDV-003"
    assert server.refused == 1
    server.stop()
    with pytest.raises(RetryLater) as gone:
        rendezvous.fetch("rank_and_size/a:0")
    assert gone.value.code == "HW-RDV-004"


def test_not_even_the_job_itself_is_unpickled(meeting: Meeting, tmp_path: Path) -> None:
    """A pickle is refused with the right token too, and so are addresses that are none."""
    for body in (
        _bomb(tmp_path / "run"),
        b'{"addresses":{"lo":[["127.0.0.1","1"]]},"key":"00"}',
        b'{"addresses":{},"key":"no key"}',
        b"{",
    ):
        assert _ask(meeting.port, "PUT", "/worker_addresses/a:0", body)[0] == 400
    assert not (tmp_path / "run").exists()
    assert meeting.driver._worker_clients == {}


def test_nonsense_is_refused_and_harms_nobody(meeting: Meeting) -> None:
    """Paths, lengths, verbs and sizes that no worker sends are answered, and the next request too."""
    for verb, path, headers, status in (
        ("GET", "/", {}, 400),
        ("GET", "/rank_and_size/a", {}, 400),
        ("GET", "/one/two/three", {}, 400),
        ("HEAD", "/global/0", {}, 501),
        ("POST", "/global/0", {}, 501),
        ("PUT", "/global/0", {"Content-Length": "-1"}, 411),
        ("PUT", "/global/0", {"Content-Length": "9" * 5000}, 411),
        ("PUT", "/global/0", {"Content-Length": str(1 << 30)}, 413),
        ("GET", "/global/0", {"X-Long": "x" * 20_000}, 403),
    ):
        connection = http.client.HTTPConnection(LOOPBACK, meeting.port, timeout=PATIENCE_S)
        connection.putrequest(verb, path)
        for name, value in {**headers, "X-Horowatt-Token": TOKEN}.items():
            connection.putheader(name, value)
        connection.endheaders()
        assert connection.getresponse().status == status, (verb, path)
    assert meeting.ready() == 0
    assert _ask(meeting.port, "PUT", "/global/0", b"1")[0] == 200


def test_slow_strangers_do_not_keep_workers_out(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that never say anything give way, and one that trickles has an end."""
    monkeypatch.setattr(rendezvous, "STRANGERS", 8)
    port = _port(server)
    idle = [socket.create_connection((LOOPBACK, port), timeout=PATIENCE_S) for _ in range(30)]
    assert _ask(port, "PUT", "/global/0", b"1")[0] == 200
    assert idle[0].recv(1) == b""
    monkeypatch.setattr(rendezvous, "HEADER_S", 0.5)
    with socket.create_connection((LOOPBACK, port), timeout=0.05) as slow:
        cut = False
        for _ in range(600):
            try:
                slow.send(b"G")
                cut = slow.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                cut = True
            break
        assert cut
    for connection in idle:
        connection.close()


def test_nothing_grows_with_the_rounds(server: Any) -> None:
    """Keys of a round go with its last worker, at the latest with the next round; made-up scopes too."""
    port, store = _port(server), server._httpd
    plan = [SimpleNamespace(size=2, hostname=name, local_rank=0, local_size=1, cross_size=2) for name in "ab"]
    for _ in range(5):
        server.init(plan)
        for rank in "01":
            for scope in ("global", "cross_0", "global_process_set_hash_5"):
                for key in (f"rank_{rank}", rank):
                    assert _ask(port, "PUT", f"/{scope}/{key}", b"address")[0] == 200
        assert _ask(port, "PUT", "/local_a/0", b"address")[0] == 200
        for scope in ("global", "cross_0", "global_process_set_hash_5"):
            assert _ask(port, "DELETE", f"/{scope}/0")[0] == 200
            # A request that comes twice does not stand for the other worker.
            assert _ask(port, "DELETE", f"/{scope}/0")[0] == 200
            assert _ask(port, "GET", f"/{scope}/1") == (200, b"address")
            assert _ask(port, "DELETE", f"/{scope}/1")[0] == 200
        assert list(store.cache) == ["local_a"]
        assert dict(store.finished_list) == {}


# --- ports


def test_ports_come_from_the_range_until_it_is_full() -> None:
    """Several jobs on one machine share a range without colliding; a full one is an error, not a wait."""
    free = _free_ports(3)
    servers = [rendezvous.make_server(LOOPBACK, TOKEN, free) for _ in range(4)]
    try:
        assert sorted(server.start() for server in servers[:3]) == list(free)
        with pytest.raises(RetryLater) as caught:
            servers[3].start()
        assert caught.value.code == "HW-RDV-002"
        servers[1].stop()
        servers[1].stop()
        assert servers[3].start() in free
    finally:
        for server in servers:
            server.stop()


def _free_ports(count: int) -> range:
    """Return so many ports in a row below those that the kernel gives away, none of them in use."""
    for first in range(20_000, 30_000, count):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for offset, probe in enumerate(sockets):
                probe.bind((LOOPBACK, first + offset))
        except OSError:
            continue
        finally:
            for probe in sockets:
                probe.close()
        return range(first, first + count)
    raise AssertionError("no free ports")


@pytest.mark.parametrize("text", ["1-65536", "0-10", "20-10", "20000", "a-b", "-5-7", "1-2-3", " 1-2", "²-³"])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    """Whoever mistypes the range is told, and does not get any port instead."""
    with pytest.raises(InvalidInput) as caught:
        rendezvous.parse_ports(text)
    assert caught.value.code == "HW-RDV-001"


def test_ranges() -> None:
    """Both ends belong to a range, and no text means any port."""
    assert rendezvous.parse_ports("20000-20999") == range(20000, 21000)
    assert rendezvous.parse_ports("7-7") == range(7, 8)
    assert rendezvous.parse_ports("") is None


# --- the notification service of a worker


def _run(script: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env={**os.environ, **environment},
    )


def test_a_notification_service_takes_nothing_from_strangers(tmp_path: Path) -> None:
    """It listens on its interface and range only, unpickles nothing without its key, and always ends."""
    ports = _free_ports(2)
    done = _run(
        f"""
        import pickle, socket, struct
        from pathlib import Path
        from horowatt.elastic import import_hooks, rendezvous
        import_hooks.install(rendezvous.client_hooks())
        from horovod.runner.common.util import secret
        from horovod.runner.elastic import worker

        class Manager:
            seen = []
            def handle_hosts_updated(self, *update): self.seen.append(update)

        class Bomb:
            def __reduce__(self): return Path.touch, (Path({str(tmp_path / "run")!r}),)

        key = secret.make_secret_key()
        service = worker.WorkerNotificationService(key, "lo", Manager())
        ((address, port),) = service.addresses()["lo"]
        assert (address, port in range({ports[0]}, {ports[-1] + 1})) == ("127.0.0.1", True)
        assert service._server.socket.getsockname() == (address, port)
        bomb = pickle.dumps(Bomb())
        wrong = secret.compute_digest(secret.make_secret_key(), bomb)
        for message in (
            wrong + struct.pack("i", len(bomb)) + bomb,
            bytes(32) + struct.pack("i", len(bomb)) + bomb,
            bytes(32) + struct.pack("i", -1) + bomb,
            bytes(32) + struct.pack("i", 2**31 - 1) + bytes(100),
            b"GET / HTTP/1.1" * 9,
            b"",
        ):
            with socket.create_connection((address, port), timeout=60) as stranger:
                stranger.sendall(message)
                stranger.shutdown(socket.SHUT_WR)
                try:
                    assert stranger.recv(1) == b""
                except ConnectionResetError:
                    pass
        silent = socket.create_connection((address, port))
        client = worker.WorkerNotificationClient(service.addresses(), key, 0)
        client.notify_hosts_updated(1.5, worker.HostUpdateResult.added)
        assert Manager.seen == [(1.5, worker.HostUpdateResult.added)], Manager.seen
        service.shutdown()
        """,
        HOROVOD_GLOO_IFACE="lo",
        HOROWATT_RENDEZVOUS_TOKEN=TOKEN,
        HOROWATT_PORTS=f"{ports[0]}-{ports[-1]}",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp_path / "run").exists()


# --- real Horovod

TRAIN = """
import os, time
from horowatt.elastic import import_hooks, rendezvous
import_hooks.install(rendezvous.client_hooks())
import horovod.torch as hvd
import psutil, torch

hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)

@hvd.elastic.run
def train(state):
    wide = 0
    while wide < 20:
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        state.step += 1
        wide = wide + 1 if hvd.size() == 2 else 0
        time.sleep(0.01)
        state.commit()

train(state)
first, last = map(int, os.environ["HOROWATT_PORTS"].split("-"))
inside = range(first, last + 1)
for connection in psutil.Process().net_connections("tcp"):
    assert connection.laddr.ip == "127.0.0.1", connection
    ours = [connection.laddr.port, *([connection.raddr.port] if connection.raddr else [])]
    assert any(port in inside for port in ours), connection
print("trained", state.step, hvd.size(), flush=True)
"""


def _worker(port: int, lease_id: str, rank: int, size: int, **environment: str) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": LOOPBACK,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_ELASTIC": "1",
        "HOROVOD_HOSTNAME": lease_id,
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": str(rank),
        "HOROVOD_CROSS_SIZE": str(size),
        "HOROWATT_RENDEZVOUS_TOKEN": TOKEN,
        **environment,
    }


@pytest.mark.horovod
def test_a_job_grows_behind_the_token_and_inside_its_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker trains, is notified, and trains on with a second one: C++ and Python show the token."""
    from horovod.runner.elastic import driver as driver_module
    from horovod.runner.elastic.discovery import FixedHosts
    from horovod.runner.elastic.rendezvous import create_rendezvous_handler

    monkeypatch.setattr(driver_module, "DISCOVER_HOSTS_FREQUENCY_SECS", 0.1)
    ports = _free_ports(100)
    hosts = FixedHosts({"a": 1})
    server = rendezvous.make_server(LOOPBACK, TOKEN, ports)
    driver = driver_module.ElasticDriver(server, hosts, 1, 2)
    port = server.start(create_rendezvous_handler(driver))
    outputs = {lease_id: tmp_path / lease_id for lease_id in "ab"}

    def work(slot: Any, _: object) -> tuple[int, float]:
        environment = _worker(
            port, slot.hostname, slot.rank, slot.size, HOROWATT_PORTS=f"{ports[0]}-{ports[-1]}"
        )
        with outputs[slot.hostname].open("wb") as output:
            done = subprocess.run(
                [sys.executable, "-c", TRAIN],
                env=environment,
                stdout=output,
                stderr=output,
                check=False,
                timeout=PATIENCE_S,
            )
        return done.returncode, time.time()

    driver.start(1, work)
    deadline_s = time.monotonic() + PATIENCE_S
    while not driver._worker_clients and time.monotonic() < deadline_s:
        time.sleep(0.02)
    hosts.set({"a": 1, "b": 1})
    while not driver.finished() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    story = "\n".join(f"--- {name}\n{path.read_text()}" for name, path in outputs.items() if path.exists())
    assert driver.finished(), story
    results = driver.get_results().worker_results
    assert {name: code for name, (code, _) in results.items()} == {"a[0]": 0, "b[0]": 0}, story
    assert all("trained" in path.read_text() for path in outputs.values()), story
    assert port in ports
    assert server.refused == 0


@pytest.mark.horovod
def test_horovod_without_the_right_token_gives_up_at_once(server: Any) -> None:
    """Horovod's C++ store asks once, is refused, and says so."""
    done = subprocess.run(
        [sys.executable, "-c", "import horovod.torch as hvd; hvd.init()"],
        env=_worker(_port(server), "a", 0, 2, HOROWATT_RENDEZVOUS_TOKEN="f" * 64),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == -signal.SIGABRT
    assert "error[HW-RDV-003]" in done.stderr
    assert server.refused == 1


@pytest.mark.horovod
@pytest.mark.parametrize(("ports", "code"), [("taken", "HW-RDV-002"), ("20000", "HW-RDV-001")])
def test_gloo_says_that_it_has_no_port(server: Any, ports: str, code: str) -> None:
    """Gloo goes no other way when its range is full or none."""
    taken = socket.create_server((LOOPBACK, 0))
    port = taken.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-c", "import horovod.torch as hvd; hvd.init()"],
        env=_worker(_port(server), "a", 0, 2, HOROWATT_PORTS=f"{port}-{port}" if ports == "taken" else ports),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    taken.close()
    assert done.returncode == -signal.SIGABRT
    assert f"error[{code}]" in done.stderr
