# SPDX-License-Identifier: Apache-2.0
"""The doctor: says what is there, what is not, and never breaks."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

from horowatt.devices.nvml import LIBRARY_VARIABLE
from horowatt.devices.simulated import (
    SimulatorConfig,
    SimulatorControl,
    build_library,
    create_state,
    simulation_environment,
)
from horowatt.devices.simulator_config import SimulatedGpuType
from horowatt.doctor import Check, Status, examination, examine, gpus, machine, software

RUNTIME = Path(__file__).parents[2] / "runtime"

FAKE_HOROVOD = """
__version__ = {version!r}
def gloo_built(): return {gloo}
def mpi_built(): return 0
def nccl_built(): return 0
"""


@pytest.fixture(autouse=True)
def no_other_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIBRARY_VARIABLE, raising=False)


def one(checks: tuple[Check, ...], name: str) -> Check:
    return next(check for check in checks if check.name == name)


def put_horovod(folder: Path, init: str, torch_init: str = "") -> None:
    (folder / "horovod/torch").mkdir(parents=True)
    (folder / "horovod/__init__.py").write_text(init)
    (folder / "horovod/torch/__init__.py").write_text(torch_init)


def nvml_library(folder: Path, body: str) -> Path:
    """Compile a library in place of NVML whose initialisation does what ``body`` says."""
    source = folder / "nvml.c"
    source.write_text(
        "#include <stdlib.h>\n#include <unistd.h>\n"
        f"int nvmlInitWithFlags(unsigned flags) {{ {body} return 0; }}\n"
        f"int nvmlInit_v2(void) {{ {body} return 0; }}\n"
    )
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def test_every_finding_can_be_acted_on(tmp_path: Path) -> None:
    """On this machine every check ends; what is not well has a code, a consequence and a fix."""
    checks = examine(state_dir=tmp_path, socket_path=tmp_path / "no.sock")
    names = [check.name for check in checks]
    assert len(set(names)) == len(names)
    wanted = ("python", "platform", "torch", "horovod", "horovod-gloo", "mpi", "build-tools", "nvml", "ssh")
    assert set(wanted) <= set(names)
    assert {"device-isolation", "ports", "clock", "state-folder", "open-files", "service"} <= set(names)
    for check in checks:
        assert check.found
        assert check.code != "HW-DOC-099", check
        if check.status is not Status.OK:
            assert check.code.startswith("HW-")
            assert check.consequence
            assert check.fix
    assert json.loads(json.dumps([check.to_json() for check in checks]))[0]["status"] == "ok"


def test_working_environment_is_well() -> None:
    """Where the tests themselves run, Python, torch, Horovod and Gloo are found to be well."""
    checks = (software.check_python(), software.check_platform(), *software.check_horovod())
    for name in ("python", "platform", "torch", "horovod", "horovod-gloo"):
        assert one(checks, name).status is Status.OK


def test_broken_check_is_reported() -> None:
    """A check that raises becomes a failed one that names the error, and hides no other."""

    def breaks() -> Check:
        raise ZeroDivisionError("by nothing")

    (check,) = examination.guarded("odd", breaks)
    assert (check.name, check.status, check.code) == ("odd", Status.FAIL, "HW-DOC-099")
    assert "ZeroDivisionError: by nothing" in check.found


def test_environment_with_base_dependencies_only(tmp_path: Path) -> None:
    """Without torch and Horovod the doctor still runs, and says what to install."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in ("msgspec", "pynvml"):
        found = find_spec(name)
        assert found is not None
        assert found.origin is not None
        origin = Path(found.origin)
        target = origin.parent if origin.name == "__init__.py" else origin
        (packages / target.name).symlink_to(target)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    script = (
        "import json; from horowatt.doctor import examine as e; print(json.dumps([c.to_json() for c in e()]))"
    )
    done = subprocess.run(
        [tmp_path / "bare/bin/python", "-c", script],
        env={**os.environ, "PYTHONPATH": f"{RUNTIME}{os.pathsep}{packages}"},
        capture_output=True,
        text=True,
        check=True,
    )
    by_name = {check["name"]: check for check in json.loads(done.stdout)}
    assert by_name["torch"]["code"] == "HW-BLD-001"
    assert by_name["horovod"]["code"] == "HW-DOC-003"
    assert "horowatt build-horovod" in by_name["horovod"]["fix"]


@pytest.mark.parametrize(
    ("init", "found"),
    [("import os; os.abort()", "status -6"), ("raise ImportError('undefined symbol')", "undefined symbol")],
)
def test_horovod_that_crashes(init: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Horovod whose import crashes the process is a finding, not the end of the doctor."""
    put_horovod(tmp_path, init)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = one(software.check_horovod(), "horovod")
    assert (check.status, check.code) == (Status.FAIL, "HW-DOC-004")
    assert found in check.found


def test_horovod_without_gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Horovod without Gloo or of another version is told apart from one that works."""
    text = FAKE_HOROVOD.format(version="0.27.0", gloo=0)
    put_horovod(tmp_path, text, text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    checks = software.check_horovod()
    assert one(checks, "horovod").code == "HW-DOC-005"
    assert one(checks, "horovod-gloo").code == "HW-DOC-006"
    assert one(checks, "horovod-gloo").status is Status.FAIL


def test_tools_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without compilers the doctor says what cannot be built, and which packages bring them."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    tools = software.check_build_tools()
    assert (tools.status, tools.code) == (Status.WARN, "HW-BLD-003")
    assert "build-essential" in tools.fix
    assert software.check_simulation_tools().code == "HW-SIM-003"
    ssh = machine.check_ssh()
    assert ssh.code == "HW-DOC-020"
    assert "openssh-client" in ssh.fix


def test_no_nvml_library() -> None:
    """Without an NVML library the doctor says so with NVML's own code, and what to do."""
    probe = "import pynvml\ntry: pynvml.nvmlInit()\nexcept pynvml.NVMLError_LibraryNotFound: print('none')"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    if done.stdout.strip() != "none":
        pytest.skip("this machine has an NVML library")
    (check,) = gpus.check_nvml()
    assert (check.name, check.status, check.code) == ("nvml", Status.WARN, "HW-NVML-012")
    assert "driver" in check.fix


def test_nvml_that_crashes_or_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that ends its caller or never answers is a finding within the time limit."""
    monkeypatch.setenv(LIBRARY_VARIABLE, str(nvml_library(tmp_path, "abort();")))
    (crashed,) = gpus.check_nvml()
    assert crashed.code == "HW-DOC-016"
    assert "signal 6" in crashed.found
    monkeypatch.setenv(LIBRARY_VARIABLE, str(nvml_library(tmp_path, "pause();")))
    (hung,) = gpus.check_nvml(timeout_s=1.0)
    assert hung.code == "HW-DOC-016"
    assert "did not answer" in hung.found


def test_simulated_gpus_are_called_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated GPUs are found through their real library and called what they are."""
    library = build_library(tmp_path / "cache")
    config = SimulatorConfig(
        (
            SimulatedGpuType(
                type="sim-a100", count=2, idle_w=55.0, context_w=30.0, demand_w=330.0, floor_w=50.0, beta=0.4,
                default_limit_w=400.0, min_limit_w=100.0, max_limit_w=400.0, speed_flop_per_s=1e8,
                link_bytes_per_s=1e7, link_w=120.0, memory_bytes=1 << 30,
            ),
        )
    )  # fmt: skip
    create_state(config, tmp_path / "state", "here", library=library, allow_nonroot=True)
    for name, value in simulation_environment(library, tmp_path / "state").items():
        monkeypatch.setenv(name, value)
    checks = gpus.check_nvml()
    assert one(checks, "nvml").status is Status.OK
    assert "2 GPUs (simulated devices)" in one(checks, "nvml").found
    assert one(checks, "energy-counters").status is Status.OK
    assert one(checks, "power-limits").status is Status.OK
    assert one(checks, "gpu-hand-over").status is Status.OK
    control, (uuid, _) = SimulatorControl(library), config.uuids("here")
    control.set_error(uuid, "nvmlDeviceGetComputeRunningProcesses", 4)
    assert one(gpus.check_nvml(), "gpu-hand-over").code == "HW-DOC-018"
    control.set_memory_errors(uuid, 1, recovery_action=1)
    check = one(gpus.check_nvml(), "gpu-hand-over")
    assert (check.code, check.found) == ("HW-DOC-017", f"{uuid} needs a reset")


def test_isolation_needs_cgroup_v2_and_a_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Isolation is only called possible with cgroup v2 and the right to set device rules."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    (tmp_path / "dev/nvidiactl").touch()
    check = gpus.check_isolation(tmp_path, tmp_path / "dev")
    assert check.code == "HW-DOC-014"
    assert "1 NVIDIA device files" in check.found
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    monkeypatch.setattr(gpus, "effective_capabilities", lambda: 0)
    assert gpus.check_isolation(tmp_path, tmp_path / "dev").code == "HW-DOC-015"
    monkeypatch.setattr(gpus, "effective_capabilities", lambda: 1 << 21)
    assert gpus.check_isolation(tmp_path, tmp_path / "dev").status is Status.OK


def test_capabilities_are_read(tmp_path: Path) -> None:
    """Capabilities come from the process's status; where they are not told there are none."""
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nCapEff:\t0000000000200000\n")
    assert gpus.effective_capabilities(status) == 1 << 21
    status.write_text("Name:\tpython\n")
    assert gpus.effective_capabilities(status) == 0


@pytest.mark.root
def test_loopback_that_is_down() -> None:
    """Without a loopback interface the doctor says that no job can run."""
    unshare = shutil.which("unshare")
    if os.geteuid() != 0 or unshare is None:
        pytest.skip("needs root and unshare, to have a network without loopback")
    script = "from horowatt.doctor.machine import check_network as c; print(c().code, c().status)"
    done = subprocess.run(
        [unshare, "--net", sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
    assert done.stdout.split() == ["HW-DOC-021", "fail"]


def test_clock_that_was_never_set() -> None:
    """A clock in 1970 is a failure, today's is not."""
    assert machine.check_clock(now_s=0.0).code == "HW-DOC-023"
    assert machine.check_clock().status is not Status.FAIL


def test_state_folder(tmp_path: Path) -> None:
    """A folder that does not exist yet is judged by where it would be; one below a file is refused."""
    check = machine.check_disk(tmp_path / "not/yet")
    assert check.code in {"", "HW-DOC-026"}
    assert "GiB free" in check.found
    (tmp_path / "file").touch()
    assert machine.check_disk(tmp_path / "file/state").code == "HW-DOC-025"


def test_service_that_is_absent_and_one_that_answers(tmp_path: Path) -> None:
    """The service's socket is only called well when something answers there."""
    path = tmp_path / "s"
    absent = machine.check_service(path)
    assert (absent.status, absent.code) == (Status.WARN, "HW-NET-001")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(1)

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

        thread = threading.Thread(target=answer)
        thread.start()
        assert machine.check_service(path).status is Status.OK
        thread.join(timeout=60)
