# SPDX-License-Identifier: Apache-2.0
"""One run of the demo, from the first process to the last."""

import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from horowatt.errors import HorowattError, RetryLater
from horowatt_allocator.adapters.inventory import load_inventory
from horowatt_allocator.cli import exits
from horowatt_allocator.cli.demonstration import plan
from horowatt_allocator.cli.demonstration.cluster import ClusterFiles, DemoCluster
from horowatt_allocator.cli.demonstration.gpus import count_real_gpus
from horowatt_allocator.cli.demonstration.interrupts import interrupts_unwind, interrupts_wait
from horowatt_allocator.cli.demonstration.plan import DemoJob
from horowatt_allocator.cli.demonstration.processes import Household, become_subreaper
from horowatt_allocator.cli.demonstration.screen import Screen
from horowatt_allocator.cli.demonstration.verdict import JobResult, problems, result_lines, result_of
from horowatt_allocator.cli.terminal import emit_json
from horowatt_allocator.cli.views import ENDED_PHASES, whole_of
from horowatt_allocator.records.energy import EnergyReport
from horowatt_allocator.reports.balance import Balance, check_balance
from horowatt_allocator.reports.energy_files import ReportFiles, write_files
from horowatt_allocator.reports.figures import printable

_TICK_S = 0.5
_SETTLE_TIMEOUT_S = 12.0
"""How long the last energy readings of a job may take to arrive."""
_SOLO_NICENESS = 15
_LOG_TAIL = 20
"""Lines of a failed job's log that are shown."""
_MIN_REAL_GPUS = 2
"""A job cannot be both grown and shrunk on one GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the user chose. ``real_gpus`` is None when the machine decides."""

    real_gpus: bool | None
    keep: bool
    as_json: bool
    out: Path
    time_limit_s: float
    vision_epochs: int | None
    speech_epochs: int | None
    search_epochs: int | None


@dataclass(slots=True)
class Submitted:
    """A job of the demo on its way. ``job_id`` is empty until it is submitted."""

    job: DemoJob
    job_id: str = ""


@dataclass(slots=True)
class Demo:
    """One run of the demo, from the first process to the last."""

    options: DemoOptions
    screen: Screen
    household: Household = field(default_factory=Household)
    checkout: Path = field(default_factory=plan.find_checkout)
    last_decision: int = 0

    def run(self) -> int:
        """Run it; whatever happens, no process is left behind."""
        become_subreaper()
        folder = Path(tempfile.mkdtemp(prefix="horowatt-demo-"))
        with interrupts_unwind():
            try:
                code = self._run(folder)
            except KeyboardInterrupt:
                self.screen.end_table()
                self.screen.say("interrupted")
                code = exits.INTERRUPTED
            finally:
                with interrupts_wait(self.screen.say):
                    left = self._clean_up(folder)
        return code if not left else max(code, exits.CHECK_FAILED)

    def _run(self, folder: Path) -> int:
        cluster, jobs = self._prepare(folder)
        try:
            self._start(cluster)
            submitted = self._train(cluster, jobs, folder)
            report = self._settled_report(cluster)
            results = [self._result(cluster, entry, report, folder) for entry in submitted]
        finally:
            self.screen.end_table()
            with interrupts_wait(self.screen.say):
                self.screen.say("ending the jobs, the agent and the service (up to 30 s)")
                cluster.stop()
        balance = check_balance(report)
        files = write_files(report, self.options.out)
        found = problems(results, balance)
        self._show(results, balance, files, found, simulated=report.simulated)
        return exits.CHECK_FAILED if found else exits.OK

    def _prepare(self, folder: Path) -> tuple[DemoCluster, tuple[DemoJob, ...]]:
        real_gpus = self._real_gpus()
        hostfiles = self.checkout / "hostfiles"
        inventory = hostfiles / "demo.toml"
        if real_gpus is not None:
            inventory = folder / "demo.toml"
            inventory.write_text('name = "demo"\n\n[[node]]\nname = "localhost"\naddress = "127.0.0.1"\n')
        files = ClusterFiles(
            folder=folder,
            inventory=inventory,
            config=hostfiles / "demo.config.toml",
            simulator=None if real_gpus is not None else hostfiles / "demo.simulator.toml",
            node=load_inventory(inventory).nodes[0].name,
        )
        jobs = plan.jobs_for(
            real_gpus=real_gpus,
            vision_epochs=self.options.vision_epochs,
            speech_epochs=self.options.speech_epochs,
            search_epochs=self.options.search_epochs,
        )
        return DemoCluster(files, self.household), jobs

    def _real_gpus(self) -> int | None:
        """Return how many real GPUs are used, or None for the simulated ones."""
        if self.options.real_gpus is False:
            self._say_simulated()
            return None
        count, why_not = count_real_gpus()
        if count >= _MIN_REAL_GPUS:
            self.screen.say(f"using the {count} NVIDIA GPUs of this machine (--simulate uses simulated ones)")
            return count
        if self.options.real_gpus:
            raise HorowattError(
                "HW-DEMO-005",
                f"the demo needs {_MIN_REAL_GPUS} NVIDIA GPUs, {count} can be used",
                because=why_not or "a job cannot be both grown and shrunk on one GPU",
                hint="leave --real-gpus out: simulated GPUs are used then",
            )
        self._say_simulated()
        return None

    def _say_simulated(self) -> None:
        self.screen.say("using four simulated GPUs: every rate, watt and joule below is simulated")

    def _start(self, cluster: DemoCluster) -> None:
        self.screen.say("starting the service: Unix socket, HTTP on loopback, SQLite (a few seconds)")
        cluster.start_service()
        self.screen.say("starting the node agent (a few seconds)")
        num_gpus = cluster.start_agent()
        self.screen.say(
            f"the service sees {num_gpus} GPUs; read-only HTTP at {cluster.http_address()}/v1/cluster"
        )

    def _train(self, cluster: DemoCluster, jobs: tuple[DemoJob, ...], folder: Path) -> list[Submitted]:
        """Submit the jobs when they are due and watch until all ended, the solo runs as well."""
        entries = [Submitted(job) for job in jobs]
        solo_left = list(jobs)
        lasting_s = self.options.time_limit_s - self.screen.elapsed_s
        self.screen.say(f"training; this takes 2 to 4 minutes (at most {lasting_s:.0f} s)")
        self.screen.say("the same scripts also run alone, at low priority, for comparison of the accuracy")
        began_s = time.monotonic()
        while True:
            self.household.reap_strays()
            cluster.check_alive()
            for entry in entries:
                if not entry.job_id and time.monotonic() - began_s >= entry.job.starts_after_s:
                    entry.job_id = self._submit(cluster, entry.job, folder)
            solo_busy = self._drive_solo(solo_left, folder)
            all_ended = self._look(cluster, entries)
            if all_ended and not solo_busy:
                return entries
            self._check_time()
            time.sleep(_TICK_S)

    def _submit(self, cluster: DemoCluster, job: DemoJob, folder: Path) -> str:
        flags = ["--name", job.tenant, "--tenant", job.tenant]
        flags += ["--min", str(job.min_width), "--max", str(job.max_width)]
        flags += ["--batch-size", str(job.batch_size), "--epochs", str(job.epochs)]
        if job.deadline_s is not None:
            flags += ["--deadline", f"{job.deadline_s:.0f}s"]
        command = [sys.executable, *job.arguments(self.checkout)]
        job_id = cluster.submit(flags, command, folder)
        self.screen.say(
            f"tenant {job.tenant} submits {job.script}, {job.epochs} epochs: it {job.purpose} [{job_id}]"
        )
        return job_id

    def _drive_solo(self, left: list[DemoJob], folder: Path) -> bool:
        """Keep one solo run going; tell whether there is anything left to do or running."""
        running = [
            name
            for name, process in self.household.processes.items()
            if name.startswith("solo-") and process.poll() is None
        ]
        if not running and left:
            job = left.pop(0)
            self.household.start(
                f"solo-{job.tenant}",
                [sys.executable, *job.arguments(self.checkout)],
                log=folder / f"solo-{job.tenant}.log",
                niceness=_SOLO_NICENESS,
                folder=folder,
            )
            return True
        return bool(running)

    def _look(self, cluster: DemoCluster, entries: list[Submitted]) -> bool:
        """Show new decisions and the jobs; tell whether all jobs were submitted and ended."""
        try:
            decisions = cluster.decisions(self.last_decision)
            jobs = cluster.jobs()
        except RetryLater:
            return False
        names = {entry.job_id: entry.job.tenant for entry in entries}
        for decision in decisions:
            self.last_decision = max(self.last_decision, whole_of(decision, "number") or 0)
            self.screen.decision(decision, names)
        self.screen.jobs(jobs)
        ended = {str(job.get("job_id")) for job in jobs if job.get("phase") in ENDED_PHASES}
        return all(entry.job_id and entry.job_id in ended for entry in entries)

    def _check_time(self) -> None:
        if self.screen.elapsed_s > self.options.time_limit_s:
            raise HorowattError(
                "HW-DEMO-006",
                f"the demo was not done after {self.options.time_limit_s:.0f} s",
                because="the machine is slower or busier than two idle cores",
                hint="run it again with --time-limit 600, or fewer --vision-epochs",
            )

    def _settled_report(self, cluster: DemoCluster) -> EnergyReport:
        """Return the report once the last readings are in, or the latest after a while."""
        self.screen.say("all jobs ended; waiting for the last energy readings (a few seconds)")
        end_s = time.monotonic() + _SETTLE_TIMEOUT_S
        while True:
            report = cluster.energy()
            if check_balance(report).adds_up or time.monotonic() > end_s:
                return report
            self.household.reap_strays()
            time.sleep(_TICK_S)

    def _result(
        self, cluster: DemoCluster, entry: Submitted, report: EnergyReport, folder: Path
    ) -> JobResult:
        view = cluster.job(entry.job_id)
        solo_log = folder / f"solo-{entry.job.tenant}.log"
        log = cluster.log(entry.job_id)
        if view.phase != "finished":
            self.screen.line(f"the end of the log of {entry.job.tenant}:")
            for line in log.splitlines()[-_LOG_TAIL:]:
                self.screen.line(f"  {printable(line)}")
        return result_of(
            tenant=entry.job.tenant,
            job_id=entry.job_id,
            phase=view.phase,
            reason=view.reason_text,
            exit_code=view.exit_code,
            log=log,
            alone_log=solo_log.read_text(errors="replace") if solo_log.exists() else "",
            energy=next((job for job in report.jobs if job.job_id == entry.job_id), None),
        )

    def _show(
        self,
        results: list[JobResult],
        balance: Balance,
        files: ReportFiles,
        found: list[str],
        *,
        simulated: bool,
    ) -> None:
        paths = {"html": str(files.html), "csv": str(files.csv), "json": str(files.json)}
        for line in ["", *result_lines(results, simulated=simulated), ""]:
            self.screen.line(line)
        self.screen.line(f"sum check: {balance.sentence}")
        for path in paths.values():
            self.screen.line(path)
        for problem in found:
            self.screen.line(f"FAILED: {problem}")
        if not found:
            self.screen.line("the demo showed what it was to show")
        if self.options.as_json:
            emit_json(
                {
                    "passed": not found,
                    "problems": found,
                    "simulated": simulated,
                    "jobs": [result.to_json() for result in results],
                    "sum_check": {"adds_up": balance.adds_up, "error": balance.booked_error_ratio,
                                  "booked_j": balance.booked_j, "counters_j": balance.counters_j},
                    "files": paths,
                    "duration_s": self.screen.elapsed_s,
                }
            )  # fmt: skip

    def _clean_up(self, folder: Path) -> list[int]:
        left = self.household.end_all()
        if left:
            self.screen.say(f"error[HW-DEMO-007]: these processes could not be ended: {left}")
        else:
            self.screen.say("no process is left behind")
        if self.options.keep:
            self.screen.say(f"logs and database: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
        return left
