# SPDX-License-Identifier: Apache-2.0
"""Where the service listens: nobody's socket is taken over, and every refusal says what to do."""

import os
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from horowatt.errors import HorowattError
from horowatt_allocator.adapters.config import ServiceConfig
from horowatt_allocator.service.identity import PeerCred, Registry, peer_of
from horowatt_allocator.service.listeners import MAX_SOCKET_PATH_BYTES, bind_tcp, bind_unix

NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short, because paths of Unix sockets must be."""
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def refused(path: Path) -> HorowattError:
    with pytest.raises(HorowattError) as caught:
        bind_unix(path).close()
    assert caught.value.hint
    return caught.value


def test_everybody_may_connect(folder: Path) -> None:
    """The socket file is open to all users, whatever the umask."""
    before = os.umask(0o077)
    try:
        with bind_unix(folder / "new" / "s.sock"):
            assert stat.S_IMODE((folder / "new" / "s.sock").stat().st_mode) == 0o666
            assert stat.S_IMODE((folder / "new").stat().st_mode) == 0o755
    finally:
        os.umask(before)


def test_a_stale_socket_is_replaced(folder: Path) -> None:
    """The socket file of a killed service does not keep a new one from starting."""
    path = folder / "s.sock"
    bind_unix(path).close()
    assert path.exists()
    with bind_unix(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_socket_in_use_is_left_alone(folder: Path) -> None:
    """A socket that somebody answers on is not taken over."""
    path = folder / "s.sock"
    with bind_unix(path):
        inode = path.stat().st_ino
        assert refused(path).code == "HW-SRV-005"
        assert path.stat().st_ino == inode


def test_other_files_are_left_alone(folder: Path) -> None:
    """Something that is not a socket is never deleted."""
    path = folder / "s.sock"
    path.write_text("precious")
    assert refused(path).code == "HW-SRV-008"
    assert path.read_text() == "precious"


def test_a_path_too_long_is_explained(folder: Path) -> None:
    """A path that does not fit into a socket address is refused with the numbers; the longest works."""
    longest = folder / ("x" * (MAX_SOCKET_PATH_BYTES - len(str(folder)) - 1))
    bind_unix(longest).close()
    error = refused(folder / (longest.name + "x"))
    assert error.code == "HW-SRV-007"
    assert "108 bytes" in error.because


def test_a_folder_open_to_all_is_refused(folder: Path) -> None:
    """Where anybody may replace the socket, no socket is put; a sticky folder is fine."""
    folder.chmod(0o777)
    assert refused(folder / "s.sock").code == "HW-SRV-006"
    folder.chmod(0o1777)
    bind_unix(folder / "s.sock").close()


def test_a_folder_that_is_a_file_is_refused(folder: Path) -> None:
    """A socket cannot be made inside a file."""
    (folder / "file").write_text("")
    assert refused(folder / "file" / "s.sock").code == "HW-SRV-006"


def test_a_port_in_use_is_named() -> None:
    """A taken port is refused with its number."""
    with bind_tcp("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(HorowattError) as caught:
            bind_tcp("127.0.0.1", port)
    assert caught.value.code == "HW-SRV-003"
    assert str(port) in caught.value.message


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1", "example.org", ""])  # noqa: S104
def test_only_loopback_is_served(host: str) -> None:
    """Anonymous callers from other machines are not possible."""
    with pytest.raises(HorowattError) as caught:
        bind_tcp(host, 0)
    assert caught.value.code == "HW-SRV-004"


def test_the_kernel_names_the_caller(folder: Path) -> None:
    """The credentials of a connection are those of the process that made it."""
    with bind_unix(folder / "s.sock") as listener:
        listener.setblocking(True)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(folder / "s.sock"))
            accepted, _ = listener.accept()
            with accepted:
                assert peer_of(accepted) == PeerCred(pid=os.getpid(), uid=os.getuid(), gid=os.getgid())


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_the_kernel_names_another_user(folder: Path) -> None:
    """Another user is known as that user."""
    connect = "import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.recv(1)"
    with bind_unix(folder / "s.sock") as listener:
        listener.setblocking(True)
        listener.settimeout(30)
        with subprocess.Popen(
            ["/usr/bin/python3", "-c", connect, str(folder / "s.sock")],
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            cwd="/",
        ) as client:
            accepted, _ = listener.accept()
            with accepted:
                assert peer_of(accepted) == PeerCred(pid=client.pid, uid=NOBODY, gid=NOBODY)


def test_roles_come_from_the_configuration() -> None:
    """Root and the service's own user may all; others only what the configuration says."""
    own = Registry(ServiceConfig(operators=("daemon",), agent_users=("nobody",)), service_uid=4242)

    def roles(uid: int) -> tuple[bool, bool]:
        caller = own.caller(PeerCred(pid=1, uid=uid, gid=uid))
        return caller.operator, caller.agent

    assert roles(0) == (True, True)
    assert roles(4242) == (True, True)
    assert roles(1) == (True, False)
    assert roles(NOBODY) == (False, True)
    assert roles(3) == (False, False)


def test_a_user_without_a_name_has_no_roles() -> None:
    """A uid that the user data base does not know is a caller without a name and without rights."""
    caller = Registry(ServiceConfig(), service_uid=0).caller(PeerCred(pid=1, uid=3_999_999_999, gid=1))
    assert (caller.username, caller.operator, caller.agent) == (None, False, False)
    assert caller.shown_name == "uid 3999999999"
