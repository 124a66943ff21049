# SPDX-License-Identifier: Apache-2.0
"""Commands as processes against a small HTTP server on a Unix socket that answers what the test says.

What the real service answers is tested with the real service in ``test_cli_service.py``; here are the
answers that it gives rarely or never: nonsense, absence, a break in the middle, an end of a job.
"""

import json
import os
import pty
import select
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from horowatt.errors import InvalidInput, NotFound
from horowatt_allocator.cli.main import COMMANDS

HOROWATT = [sys.executable, "-m", "horowatt_allocator.cli.main"]
HOSTILE = "\x1b[31m<b>$(touch pwned);\u202e"

Answer = tuple[int, bytes]
Responder = Callable[[str, str, dict[str, str], bytes], Answer]


def ok(document: object) -> Answer:
    return 200, json.dumps(document).encode()


def job(**fields: object) -> dict[str, Any]:
    return {
        "job_id": "j1-0001", "name": "digits", "tenant": "vision", "phase": "running", "width": 2,
        "target_width": 4, "legal_widths": [1, 2, 4], "gpu_type": "sim-a100", "limit_w": 240.0,
        "rate_per_s": 812.5, "power_w": 431.0, "energy_j": 12_340.0, "simulated": True, "exit_code": None,
        "reason": {"code": "GROW", "sentence": "grows: 2 more GPUs are worth it"}, **fields,
    }  # fmt: skip


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

    def __init__(self, path: Path, respond: Responder) -> None:
        self.respond = respond
        self.calls: list[tuple[str, str, dict[str, str], bytes, dict[str, str]]] = []
        super().__init__(str(path), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {key.lower(): value for key, value in self.headers.items()}
        self.server.calls.append((self.command, parts.path, query, body, headers))
        status, payload = self.server.respond(self.command, parts.path, query, body)
        self.send_response(status)
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    do_GET = do_POST = _answer  # noqa: N815 - http.server finds them by these names

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@contextmanager
def serving(respond: Responder, path: Path | None = None) -> Iterator[_Server]:
    """Run the server; its path is short because Unix socket paths must be."""
    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        server = _Server(path or Path(folder) / "s.sock", respond)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
            Path(str(server.server_address)).unlink(missing_ok=True)


def environment(**extra: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HOROWATT_")}
    return {**kept, **extra}


def run(
    *arguments: str, server: _Server | None = None, cwd: Path | None = None, **extra: str
) -> subprocess.CompletedProcess[str]:
    if server is not None:
        extra["HOROWATT_SOCKET"] = str(server.server_address)
    return subprocess.run(
        [*HOROWATT, *arguments], env=environment(**extra), cwd=cwd, capture_output=True, text=True,
        encoding="utf-8", timeout=60, check=False,
    )  # fmt: skip


def listing(*jobs: dict[str, Any]) -> Responder:
    return lambda *_: ok({"schema_version": 1, "jobs": list(jobs)})


# ------------------------------------------------------------------------------- group and errors


def test_help_lists_every_command_without_importing_it() -> None:
    """The group's help names all commands and loads neither them nor anything heavy."""
    code = (
        "import sys; from horowatt_allocator.cli.main import main; code = main(['--help']);"
        "heavy = {'rich', 'jinja2', 'fastapi', 'pydantic', 'sqlalchemy', 'torch', 'msgspec', 'pulp',"
        " 'http.client', 'horowatt_allocator.cli.ps', 'horowatt_allocator.cli.demo'} & set(sys.modules);"
        "print(sorted(heavy), code, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr.strip() == "[] 0"
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help(command: str) -> None:
    """Each command of the table exists and explains itself."""
    done = run(command, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: horowatt " + command)


@pytest.mark.parametrize("command", ["ps", "nodes", "explain", "logs", "cancel", "report"])
def test_client_commands_load_nothing_heavy(command: str) -> None:
    """A command that only asks the service starts without the service's own libraries."""
    code = (
        f"import sys; from horowatt_allocator.cli.main import main; main([{command!r}, '--help']);"
        "print(sorted({'rich', 'jinja2', 'fastapi', 'pydantic', 'sqlalchemy', 'torch', 'pulp'} &"
        " set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nosuch"],
        ["ps", "--nosuch"],
        ["explain"],
        ["cancel"],
        ["ps", "-w", "--json"],
        ["submit", "--max", "x", "a"],
    ],
)
def test_usage_errors(arguments: list[str]) -> None:
    """Wrong usage is one error with its usage line, exit code 126, and nothing on stdout."""
    done = run(*arguments)
    assert done.returncode == 126
    assert done.stdout == ""
    assert done.stderr.startswith("error[HW-CLI-001]: ")
    assert "usage: horowatt" in done.stderr


def test_absent_service_is_a_tool_error(tmp_path: Path) -> None:
    """Without a service the command says how to start one; exit code 125."""
    done = run("ps", HOROWATT_SOCKET=str(tmp_path / "none"))
    assert done.returncode == 125
    assert "HW-NET-001" in done.stderr
    assert "horowatt serve" in done.stderr


@pytest.mark.parametrize("answer", [b"<html>", b"[1, 2]", b"", b"\xff"])
def test_nonsense_from_the_service(answer: bytes) -> None:
    """An answer that is no JSON object is an error with a code, not a traceback."""
    with serving(lambda *_: (200, answer)) as server:
        done = run("ps", "--json", server=server)
    assert done.returncode == 125
    assert done.stdout == ""
    assert "HW-CLI-010" in done.stderr
    assert "Traceback" not in done.stderr


def test_errors_of_the_service_keep_their_code() -> None:
    """What the service refuses is shown with its code, reason and hint, and mapped to an exit code."""
    missing = NotFound("HW-API-010", "there is no job 'x'", because="or it is another's", hint="horowatt ps")
    bad = InvalidInput("HW-JOB-001", "no", hint="yes")
    for error, code in ((missing, 127), (bad, 126)):
        problem = json.dumps(error.to_problem()).encode()
        with serving(lambda *_, p=problem, e=error: (e.http_status, p)) as server:  # type: ignore[misc]
            done = run("explain", "x", server=server)
        assert (done.returncode, done.stdout, done.stderr) == (code, "", f"{error}\n")


def test_unexpected_errors_show_no_traceback_unless_asked() -> None:
    """A bug is one line with a hint; HOROWATT_DEBUG=1 adds the traceback."""
    code = (
        "import sys; from horowatt_allocator.cli import main as m, nodes;"
        "nodes.nodes.callback = lambda **_: 1 / 0; sys.exit(m.main(['nodes']))"
    )
    for debug in ("", "1"):
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment(HOROWATT_DEBUG=debug), capture_output=True,
            text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 125
        assert "error[HW-CLI-000]" in done.stderr
        assert "division by zero" in done.stderr
        assert ("Traceback" in done.stderr) == bool(debug)


def test_a_closed_pipe_is_quiet() -> None:
    """A reader that leaves early ends the command without a word."""
    with serving(listing(*[job(job_id=f"j1-{n:04d}", name="n" * 200) for n in range(2000)])) as server:
        process = subprocess.Popen(
            [*HOROWATT, "ps"], env=environment(HOROWATT_SOCKET=str(server.server_address)),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        errors = process.stderr.read()
        process.stderr.close()
        assert process.wait(30) == 141
    assert errors == b""


def test_output_that_cannot_be_encoded_is_spelled() -> None:
    """A terminal without Unicode gets the names spelled out, not an error."""
    with serving(listing(job(name="\u6f22\u5b57"))) as server:
        done = run("ps", server=server, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "\\u6f22\\u5b57" in done.stdout


# ------------------------------------------------------------------------------------------- ps


def test_ps_shows_the_table_and_marks_simulated_figures() -> None:
    """A pipe gets plain columns: width with its target, units, and 'sim' at each simulated figure."""
    with serving(listing(job(), job(job_id="j1-0002", simulated=False, width=4, rate_per_s=None))) as server:
        done = run("ps", server=server)
    head, first, second = done.stdout.splitlines()
    assert head.split()[:4] == ["JOB", "NAME", "TENANT", "PHASE"]
    assert "2>4" in first
    assert "240 W" in first
    assert "812/s sim" in first
    assert "431 W sim" in first
    assert "12.34 kJ sim" in first
    assert first.endswith("grows: 2 more GPUs are worth it")
    assert "sim-a100" in second
    assert " sim " not in second
    assert "\x1b" not in done.stdout


def test_ps_says_that_there_are_no_jobs_on_stderr() -> None:
    """An empty cluster is said in prose, so that stdout stays empty."""
    with serving(listing()) as server:
        done = run("ps", server=server)
    assert (done.returncode, done.stdout) == (0, "")
    assert "no jobs" in done.stderr


def test_hostile_names_cannot_act_on_the_terminal() -> None:
    """Escape sequences and direction overrides in names and reasons are spelled out in the table."""
    reason = {"code": "x", "sentence": HOSTILE}
    with serving(listing(job(name=HOSTILE, tenant=HOSTILE, reason=reason))) as server:
        done = run("ps", server=server)
    assert "\x1b" not in done.stdout
    assert "\u202e" not in done.stdout
    assert done.stdout.count("\\x1b[31m<b>$(touch pwned);\\u202e") == 3


@pytest.mark.parametrize("command", [["ps"], ["nodes"], ["explain", "j"], ["cancel", "j"], ["logs", "j"]])
def test_json_is_one_object_and_nothing_else(command: list[str]) -> None:
    """With --json stdout is one object with schema_version, whatever the names hold."""

    def respond(method: str, path: str, query: dict[str, str], body: bytes) -> Answer:
        if path.endswith("/logs"):
            return ok({"lines": [{"stream": "launcher", "text": HOSTILE}], "cursor": "1", "ended": True})
        return ok({**job(name=HOSTILE), "jobs": [], "nodes": []})

    with serving(respond) as server:
        done = run(*command, "--json", server=server)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema_version"] == 1
    assert done.stdout.count("\n") == 1


def test_watch_goes_on_after_a_restart_and_ends_well_on_ctrl_c() -> None:
    """--watch waits for a service that is restarted, and Ctrl-C is its normal end."""
    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        path = Path(folder) / "s.sock"
        with serving(listing(job(name="before")), path) as server:
            process = subprocess.Popen(
                [*HOROWATT, "ps", "--watch"], env=environment(HOROWATT_SOCKET=str(path)),
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            wait_for(lambda: len(server.calls) >= 2)
        with serving(listing(job(name="after")), path) as server:
            wait_for(lambda: len(server.calls) >= 2)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "before" in out
    assert "after" in out
    assert "Traceback" not in err


def wait_for(done: Callable[[], bool], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


def on_terminal(*arguments: str, server: _Server, until: Callable[[], bool], **extra: str) -> tuple[int, str]:
    """Run a command on a pseudo-terminal, press Ctrl-C when the time has come, return what was drawn."""
    leader, follower = pty.openpty()
    extra["HOROWATT_SOCKET"] = str(server.server_address)
    process = subprocess.Popen(
        [*HOROWATT, *arguments], env=environment(TERM="xterm-256color", COLUMNS="200", **extra),
        stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    drawn = b""
    sent = False
    while True:
        if not sent and until():
            process.send_signal(signal.SIGINT)
            sent = True
        if select.select([leader], [], [], 0.05)[0]:
            try:
                chunk = os.read(leader, 65_536)
            except OSError:  # the last writer has closed the terminal
                break
            if not chunk:
                break
            drawn += chunk
    os.close(leader)
    return process.wait(30), drawn.decode(errors="replace")


def test_watch_redraws_on_a_terminal() -> None:
    """On a terminal the table is redrawn in place, and names still cannot act on it."""
    with serving(listing(job(name=HOSTILE))) as server:
        code, drawn = on_terminal("ps", "-w", server=server, until=lambda: len(server.calls) >= 3)
    assert code == 0
    assert "\x1b[1A" in drawn or "\x1b[2K" in drawn
    assert "\x1b[31m<b>" not in drawn
    assert "\\x1b[31m<b>" in drawn


def test_no_color_is_honoured() -> None:
    """NO_COLOR leaves the table without colours, on a terminal as well."""
    with serving(listing(job())) as server:
        code, drawn = on_terminal("ps", server=server, until=lambda: False, NO_COLOR="1")
    assert code == 0
    assert "digits" in drawn
    assert "\x1b[3" not in drawn


# ----------------------------------------------------------------------------------------- submit


def test_submit_sends_the_command_as_it_is(tmp_path: Path) -> None:
    """Words with blanks, quotes and shell signs arrive as one word each; nothing runs them here."""
    words = [
        "python",
        "my train.py",
        "a b",
        "; touch pwned",
        "$(touch pwned)",
        "`x`",
        "'\"",
        "--epochs",
        "3",
        "--json",
    ]
    with serving(lambda *_: ok(job())) as server:
        done = run("submit", "--tenant", "v; $(x)", "--max", "2", "--idempotency-key", "k1", "--", *words,
                   server=server, cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    [(method, path, _, body, headers)] = server.calls
    sent = json.loads(body)
    assert (method, path, headers["idempotency-key"]) == ("POST", "/v1/jobs", "k1")
    assert sent["command"] == words
    assert sent["tenant"] == "v; $(x)"
    assert sent["widths"] == "1,2"
    assert list(tmp_path.iterdir()) == []
    assert done.stdout.startswith("j1-0001  digits: ")
    assert "there is no script my train.py" in done.stderr


def test_submit_options_end_at_the_command() -> None:
    """Options after the command belong to the command, also without '--'."""
    with serving(lambda *_: ok(job())) as server:
        run("submit", "--quiet", "python", "train.py", "--epochs", "9", "--max", "3", server=server)
    sent = json.loads(server.calls[0][3])
    assert sent["command"] == ["python", "train.py", "--epochs", "9", "--max", "3"]
    assert "total_epochs" not in sent


def test_submit_quiet_prints_the_id_alone() -> None:
    """--quiet is for scripts: the id and a line end."""
    with serving(lambda *_: ok(job())) as server:
        done = run("submit", "-q", "--", "python", "x.py", server=server)
    assert done.stdout == "j1-0001\n"


def test_submit_from_a_file_with_flags_over_it(tmp_path: Path) -> None:
    """A job file is the base, and flags win."""
    (tmp_path / "j.toml").write_text('command = ["python", "a.py"]\ntenant = "vision"\nmax = 8\nepochs = 3\n')
    with serving(lambda *_: ok(job())) as server:
        done = run("submit", "-f", str(tmp_path / "j.toml"), "--max", "2", "--json", server=server)
    sent = json.loads(server.calls[0][3])
    assert (sent["widths"], sent["tenant"], sent["total_epochs"]) == ("1,2", "vision", 3.0)
    assert json.loads(done.stdout)["job"]["job_id"] == "j1-0001"


def test_submit_bad_file_is_invalid_input(tmp_path: Path) -> None:
    """A mistake in the file ends with 126 before anything is sent."""
    (tmp_path / "j.toml").write_text("maximum = 8\n")
    with serving(lambda *_: ok(job())) as server:
        done = run("submit", "-f", str(tmp_path / "j.toml"), "--", "a", server=server)
    assert done.returncode == 126
    assert "HW-CLI-005" in done.stderr
    assert server.calls == []


def ending(*ends: dict[str, Any]) -> Responder:
    """Answer a submission, then one job view after the other."""
    left = list(ends)

    def respond(method: str, path: str, query: dict[str, str], body: bytes) -> Answer:
        if method == "POST":
            return ok(job(phase="queued", width=0))
        return ok(left.pop(0) if len(left) > 1 else left[0])

    return respond


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ({"phase": "finished", "exit_code": 0}, 0),
        ({"phase": "failed", "exit_code": 3}, 3),
        ({"phase": "failed", "exit_code": -9}, 137),
        ({"phase": "failed", "exit_code": 0}, 125),
        ({"phase": "cancelled", "exit_code": None}, 125),
    ],
)
def test_submit_wait_returns_the_jobs_exit_code(end: dict[str, Any], code: int) -> None:
    """--wait ends as the job does, and never with 0 for a job that did not finish."""
    with serving(ending(job(), job(**end))) as server:
        done = run("submit", "--wait", "--json", "--", "python", "x.py", server=server)
    assert done.returncode == code
    document = json.loads(done.stdout)
    assert document["exit_code"] == code
    assert document["job"]["phase"] == end["phase"]
    assert ("HW-CLI-011" in done.stderr) == (code != 0)


def test_submit_wait_can_be_left() -> None:
    """Ctrl-C stops waiting, says that the job goes on, and cancels nothing."""
    with serving(ending(job())) as server:
        process = subprocess.Popen(
            [*HOROWATT, "submit", "--wait", "--", "python", "x.py"],
            env=environment(HOROWATT_SOCKET=str(server.server_address)),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        wait_for(lambda: len(server.calls) >= 2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "the job goes on" in err
    assert {call[0] for call in server.calls[1:]} == {"GET"}


def test_submit_attach_prints_the_horovodrun_command() -> None:
    """An attached job's command is printed once its node is known."""
    script = "/run dir/jobs/j1-0001/discover.sh"
    with serving(ending(job(), job(discovery_script=script, home_node="n1"))) as server:
        done = run("submit", "--attach", "--max", "4", "--", "python", "my train.py", server=server)
    assert done.returncode == 0, done.stderr
    assert json.loads(server.calls[0][3])["launcher"] == "attached"
    assert "horovodrun -np 1 --min-np 1 --max-np 4 --host-discovery-script" in done.stderr
    assert "horowatt worker -- python 'my train.py'" in done.stderr


# ------------------------------------------------------------------------- logs, cancel, report


class _Log:
    """A log that grows, and a service that breaks once in between."""

    def __init__(self, *, breaks_at: int | None = None) -> None:
        self.breaks_at = breaks_at
        self.asked: list[str] = []

    def __call__(self, *call: Any) -> Answer:
        _, _, query, _ = call
        cursor = query.get("cursor", "")
        self.asked.append(cursor)
        at = int(cursor or 0)
        if at == self.breaks_at:
            self.breaks_at = None
            raise ConnectionResetError
        lines = [{"stream": "lease/l-7", "node": "n", "text": f"line {at}"}]
        if at >= 3:
            return ok({"lines": [], "cursor": "3", "ended": True, "more": False})
        return ok({"lines": lines, "cursor": str(at + 1), "ended": False, "more": at == 0})


class _Quiet(_Server):
    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


def test_logs_follow_resumes_and_ends_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """-f shows each line once although the connection breaks, and ends when nothing more will come."""
    monkeypatch.setitem(globals(), "_Server", _Quiet)
    log = _Log(breaks_at=2)
    with serving(log) as server:
        done = run("logs", "-f", "j1", server=server)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "l-7 | line 0\nl-7 | line 1\nl-7 | line 2\n"
    assert log.asked.count("2") == 2


def test_logs_without_follow_show_what_is_there() -> None:
    """Without -f the pages that are there now are shown, and --raw leaves the prefix out."""
    with serving(_Log()) as server:
        done = run("logs", "--raw", "j1", server=server)
    assert done.stdout == "line 0\nline 1\n"


def test_logs_follow_left_by_ctrl_c() -> None:
    """Leaving -f by Ctrl-C ends with 130."""
    answer = ok({"lines": [], "cursor": "0", "ended": False})

    def respond(method: str, path: str, query: dict[str, str], body: bytes) -> Answer:
        time.sleep(0.1 if float(query["wait_s"]) else 0)
        return answer

    with serving(respond) as server:
        process = subprocess.Popen(
            [*HOROWATT, "logs", "-f", "j"], env=environment(HOROWATT_SOCKET=str(server.server_address)),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        wait_for(lambda: len(server.calls) >= 3)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in err


def test_cancel_tries_all_jobs() -> None:
    """One unknown job does not keep the others from being ended, and the exit code tells of it."""

    def respond(method: str, path: str, query: dict[str, str], body: bytes) -> Answer:
        if "gone" in path:
            return 404, json.dumps(NotFound("HW-API-010", "no such job").to_problem()).encode()
        return ok(job(job_id=path.split("/")[3], phase="stopping"))

    with serving(respond) as server:
        done = run("cancel", "a", "gone", "b c", "--json", server=server)
    assert done.returncode == 127
    document = json.loads(done.stdout)
    assert [entry["phase"] for entry in document["jobs"]] == ["stopping", "stopping"]
    assert document["errors"]["gone"]["code"] == "HW-API-010"
    assert [call[0] for call in server.calls] == ["POST"] * 3


def energy_answer() -> Answer:
    line = {"energy_j": 500.0, "measured_s": 10.0, "unmeasured_s": 0.0, "integrated_s": 0.0,
            "bridged_s": 0.0, "simulated": True}  # fmt: skip
    nothing = {**line, "energy_j": 0.0}
    return ok(
        {
            "schema_version": 1, "cluster": "demo", "start_s": 0.0, "end_s": 10.0, "made_s": 10.0,
            "scope": "GPU boards", "simulated": True, "jobs": [], "devices": [],
            "tenants": [{"tenant": HOSTILE, "num_jobs": 1, "energy": line}],
            "idle": nothing, "unattributed": nothing, "total": line, "devices_j": 500.0,
            "booked_on_counters_j": 500.0, "sum_error": 0.0,
        }
    )  # fmt: skip


def test_report_writes_three_files_and_prints_totals(tmp_path: Path) -> None:
    """The report's files lie where asked, and the totals and the sum check are printed."""
    with serving(lambda *_: energy_answer()) as server:
        done = run("report", "--out", "my out", server=server, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "my out").iterdir()) == [
        "energy.csv", "energy.html", "energy.json",
    ]  # fmt: skip
    assert "500.0 J" in done.stdout
    assert "simulated devices" in done.stdout
    assert "sum check: adds up" in done.stdout
    assert "\x1b" not in done.stdout


def test_report_json(tmp_path: Path) -> None:
    """--json gives the report itself and the paths."""
    with serving(lambda *_: energy_answer()) as server:
        done = run("report", "--json", server=server, cwd=tmp_path)
    document = json.loads(done.stdout)
    assert document["report"]["total"]["energy_j"] == 500.0
    assert document["adds_up"] is True
    assert (tmp_path / document["files"]["html"]).is_file()


def test_report_to_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    """A folder that cannot be made is bad input."""
    (tmp_path / "taken").write_text("")
    with serving(lambda *_: energy_answer()) as server:
        done = run("report", "--out", str(tmp_path / "taken" / "x"), server=server)
    assert done.returncode == 126
    assert "HW-REP-002" in done.stderr


def test_explain_shows_the_plan_and_the_history() -> None:
    """The explanation names what the job has, what was planned and measured, and what was decided."""
    answer = {
        "schema_version": 1, "job": job(discovery_script=None, samples=50, total_samples=200, isolated=False),
        "queue_position": 2, "queue_length": 3,
        "plan": {"status": "optimal", "gap_ratio": 0.0, "solver": "cbc", "binding": ["gpus:sim-a100"],
                 "power_w": 900.0,
                 "column": {"gpu_type": "sim-a100", "width": 4, "limit_w": None, "rate_per_s": 900.0,
                            "low_rate_per_s": 800.0, "high_rate_per_s": 1000.0, "held_w": 600.0}},
        "columns": [{"gpu_type": None, "width": 0, "limit_w": None, "rate_per_s": 0.0, "held_w": 0.0}],
        "observations": [{"gpu_type": "sim-a100", "width": 2, "limit_w": None, "rate_per_s": 500.0,
                          "power_w": 400.0, "seconds_s": 10.0, "at_s": 5.0}],
        "story": [{"at_s": 3.0, "code": "STARTED", "sentence": "started"}],
        "decisions": [{"number": 7, "at_s": 4.0, "trigger": "tick", "changes": [
            {"job_id": "j1-0001", "width_before": 2, "width_after": 4,
             "reason": {"code": "GROW", "sentence": HOSTILE}}]}],
    }  # fmt: skip
    with serving(lambda *_: ok(answer)) as server:
        done = run("explain", "j1-0001", server=server)
    assert done.returncode == 0, done.stderr
    for text in (
        "waits as number 2 of 3", "25.0 %", "not isolated", "4 x sim-a100",
        "900/s expected (800/s to 1,000/s)", "gpus:sim-a100", "started [STARTED]",
        "decision 7 (tick): width 2 -> 4", "(simulated devices)",
    ):  # fmt: skip
        assert text in done.stdout
    assert "\x1b" not in done.stdout


def test_explain_shows_resizes() -> None:
    """Each resize is a block; what tenants wrote is harmless; an older service shows none."""
    phase = {"phase": "granted", "first_after_s": 0.1, "last_after_s": 0.1, "count": 1, "took_s": 0.1,
             "slowest": True, "last_lease_id": ""}  # fmt: skip
    resize = {"number": 4, "kind": "grow", "width_before": 1, "width": 2, "decided_s": 0.0, "cold": True,
              "outcome": None, "pause_s": None, "first_step_after_s": None, "phases": [phase],
              "clocks_s": {"n2": -300.0}, "code": "HW-X", "why": HOSTILE}  # fmt: skip
    answer = job(resizes=[{**resize, "number": 3}, resize], cold=HOSTILE)
    with serving(lambda *_: ok(answer)) as server:
        done = run("explain", "digits", "--resizes", "--last", "1", server=server)
        as_json = run("explain", "digits", "--resizes", "--json", server=server)
    assert done.returncode == 0, done.stderr
    for text in (
        "... 1 earlier resizes", "generation 4: grows 1 -> 2, cold, under way", "pause not measured",
        "no first step seen", "slowest", "300.0 s ahead of the head's", "[HW-X]", "start cold",
    ):  # fmt: skip
        assert text in done.stdout
    assert "generation 3" not in done.stdout
    assert "\x1b" not in done.stdout
    assert [entry["number"] for entry in json.loads(as_json.stdout)["resizes"]] == [3, 4]
    with serving(lambda *_: ok(job())) as server:
        done = run("explain", "digits", "--resizes", server=server)
    assert (done.returncode, "no resizes" in done.stdout) == (0, True)


def test_nodes_shows_gpus_and_notes() -> None:
    """Each GPU is a line with its holder, power and what is special about it."""
    gpu = {"uuid": "GPU-1", "gpu_type": "sim-a100", "simulated": True, "power_w": 55.0, "limit_w": 400.0,
           "lost": True, "job_id": None}  # fmt: skip
    first = {"name": "n1", "state": "silent", "isolated": False, "gpus": [gpu], "notes": {"N-1": "hot"},
             "clock_off_s": 61.0}  # fmt: skip
    answer = {"nodes": [first, {"name": "n2", "state": "unseen", "gpus": []}]}
    with serving(lambda *_: ok(answer)) as server:
        done = run("nodes", server=server)
    lines = done.stdout.splitlines()
    assert "55 W sim" in lines[1]
    assert "lost, simulated, not isolated" in lines[1]
    assert "no GPU was reported yet" in lines[2]
    assert "note: n1: N-1: hot" in done.stderr
    assert "note: n1: its clock is 61.0 s behind the head's" in done.stderr
