# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine: network namespaces with their own names, addresses, sshd and run folders."""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cluster import wait_for

SSHD = "/usr/sbin/sshd"
SUBNET = "10.213.7"


def missing_tools() -> str:
    """Return what this machine lacks for several hosts, or an empty string."""
    if os.geteuid() != 0:
        return "root"
    for tool in ("ip", "unshare", "ssh", "ssh-keygen"):
        if shutil.which(tool) is None:
            return tool
    return "" if Path(SSHD).exists() else "sshd"


@dataclass
class Host:
    """One namespace. ``run_dir`` is the same path on every host and holds its own files on each."""

    name: str
    namespace: str
    address: str
    private_run: Path
    run_dir: Path
    ssh_home: Path
    interface: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def command(self, arguments: list[str]) -> list[str]:
        """Return the command that runs ``arguments`` on this host."""
        prelude = (
            'hostname "$1" && mount --bind "$2" "$3" && mount --bind "$4" /root/.ssh && shift 4 && exec "$@"'
        )
        return [
            "ip", "netns", "exec", self.namespace, "unshare", "-u", "-m", "sh", "-c", prelude, "sh",
            self.name, str(self.private_run), str(self.run_dir), str(self.ssh_home), *arguments,
        ]  # fmt: skip

    def start(self, arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a process on this host."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                self.command(arguments),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def link(self, state: str) -> None:
        """Take this host's interface ``up`` or ``down``."""
        _ip("-n", self.namespace, "link", "set", self.interface, state)

    def workers(self) -> list[int]:
        """Return the workers of jobs on this host, and the ssh helpers that hold them."""
        found = []
        for pid in self.pids():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"horowatt.elastic.start" in words or b"horowatt.elastic.remote" in words:
                    found.append(pid)
        return found

    def pids(self) -> list[int]:
        """Return every process that lives in this host's network namespace."""
        done = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False
        )
        return [int(word) for word in done.stdout.split()]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Yield two hosts that reach each other over their own interface, and by ssh without a password."""
    tag = secrets.token_hex(2)
    run_dir = folder / "run"
    run_dir.mkdir()
    ssh_home = folder / "ssh"
    ssh_home.mkdir(mode=0o700)
    made_ssh = not Path("/root/.ssh").exists()
    Path("/root/.ssh").mkdir(mode=0o700, exist_ok=True)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    hosts = []
    for number, letter in enumerate("ab", start=1):
        private = folder / f"run-{letter}"
        private.mkdir()
        hosts.append(
            Host(
                f"node{letter}",
                f"hw{tag}{letter}",
                f"{SUBNET}.{number}",
                private,
                run_dir,
                ssh_home,
                # The two ends have different names, as interfaces of different machines have.
                {"a": "eth0", "b": "ens1"}[letter],
            )
        )
    try:
        _network(hosts)
        _ssh(hosts, folder)
        yield hosts[0], hosts[1]
    finally:
        _tear_down(hosts)
        if made_ssh:
            with contextlib.suppress(OSError):
                Path("/root/.ssh").rmdir()


def _network(hosts: list[Host]) -> None:
    names = "\n".join(f"{host.address} {host.name}" for host in hosts)
    for host in hosts:
        _ip("netns", "add", host.namespace)
        private_etc = Path("/etc/netns") / host.namespace
        private_etc.mkdir(parents=True)
        (private_etc / "hosts").write_text(f"127.0.0.1 localhost\n{names}\n")
    first, second = hosts
    _ip(
        "link",
        "add",
        first.interface,
        "netns",
        first.namespace,
        "type",
        "veth",
        "peer",
        "name",
        second.interface,
        "netns",
        second.namespace,
    )
    for host in hosts:
        _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
        host.link("up")
        _ip("-n", host.namespace, "link", "set", "lo", "up")


def _ssh(hosts: list[Host], folder: Path) -> None:
    home = hosts[0].ssh_home
    for name in ("id_ed25519", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / name)], check=True)
    shutil.copy(home / "id_ed25519.pub", home / "authorized_keys")
    host_key = (home / "host_key.pub").read_text().strip()
    (home / "known_hosts").write_text(
        "".join(f"{word} {host_key}\n" for host in hosts for word in (host.address, host.name))
    )
    for host in hosts:
        host.start(
            [
                SSHD, "-D", "-e", "-f", "/dev/null", "-h", str(home / "host_key"), "-o", "UsePAM=no",
                "-o", "StrictModes=no", "-o", f"ListenAddress={host.address}", "-o", "PidFile=none",
                "-o", "AuthorizedKeysFile=/root/.ssh/authorized_keys", "-o", "PermitRootLogin=yes",
            ],
            folder / f"sshd-{host.name}.log",
        )  # fmt: skip
    first, second = hosts
    for source, target in ((first, second), (second, first)):

        def reachable(source: Host = source, target: Host = target) -> bool:
            done = subprocess.run(
                source.command(["ssh", "-o", "BatchMode=yes", target.address, "true"]),
                capture_output=True,
                check=False,
            )
            return done.returncode == 0

        wait_for(reachable, timeout_s=20, what=f"ssh from {source.name} to {target.name}")


def _tear_down(hosts: list[Host]) -> None:
    for host in hosts:
        for pid in host.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for host in hosts:
        for process in host.processes:
            process.wait(20)
        subprocess.run(["ip", "netns", "del", host.namespace], check=False, capture_output=True)
        shutil.rmtree(Path("/etc/netns") / host.namespace, ignore_errors=True)
    with contextlib.suppress(OSError):
        Path("/etc/netns").rmdir()
