# SPDX-License-Identifier: Apache-2.0
"""Timelines of resizes from the events of several nodes, whose clocks and manners may be bad."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace

import pytest
from specimens import NOW_S, lease, node, spec, state
from virtual_node import Script, VirtualCluster, _Launch, _Worker

from horowatt.records import AgentReport, StreamChunk
from horowatt_allocator.adapters.store_rows import job_row
from horowatt_allocator.cli.resizes import resizes_lines
from horowatt_allocator.decisions.draft import Draft
from horowatt_allocator.decisions.estimates import expected_pause_s, observe_pause, pause_kind
from horowatt_allocator.decisions.measuring import absorb_events, measure
from horowatt_allocator.decisions.timeline import (
    KEPT_RESIZES,
    MAX_TEXT_CHARS,
    SET_BACK_REPORTS,
    STRETCH_REPORTS,
    ResizeKind,
    ResizeOutcome,
    ResizeStory,
    observe_clock,
    resize_stories,
)
from horowatt_allocator.records.cluster import Policy
from horowatt_allocator.records.jobs import (
    Generation,
    Job,
    JobEstimate,
    JobPhase,
    PauseKind,
    ResizePhase,
    StreamCursor,
)

WAY_S = 0.02
"""From an agent to the head."""
STEP_S = 0.1


class Head:
    """One job with its files of events on nodes ``n1`` and ``n2``; all times given are true ones."""

    def __init__(self, clocks_s: Mapping[str, float] | None = None) -> None:
        self.ahead_s = {"n1": 0.0, "n2": 0.0, **(clocks_s or {})}
        self.files = {"n1": "", "n2": ""}
        running = Job(spec=spec(), phase=JobPhase.RUNNING, attempt=1, started_s=NOW_S, step_s=STEP_S)
        self.state = state(node("n1", 4), node("n2", 4), jobs=(running,))

    @property
    def job(self) -> Job:
        return self.state.jobs["j0"]

    @property
    def stories(self) -> tuple[ResizeStory, ...]:
        return resize_stories(self.job)

    def put(self, job: Job) -> None:
        self.state = replace(self.state, jobs={"j0": job})

    def decide(self, after_s: float, width: int, *, start: bool = False) -> None:
        """Publish a generation; leases go to the nodes by turns, the first to ``n1``."""
        job, at_s = self.job, NOW_S + after_s
        before = job.generations
        if before:
            ended_s = at_s - 5 if start else at_s
            before = (*before[:-1], replace(before[-1], ended_s=ended_s))
        number = job.generation + 1
        new = Generation(number=number, width=width, gpu_type="V", limit_w=None, published_s=at_s)
        leases = [lease(f"l{n}", "j0", f"n{n % 2 + 1}", n // 2) for n in range(width)]
        self.state = replace(self.state, leases={one.lease_id: one for one in leases})
        lease_ids = tuple(one.lease_id for one in leases)
        self.put(replace(job, generation=number, lease_ids=lease_ids, generations=(*before, new)))

    def write(self, where: str, kind: str, after_s: float, lease_id: str = "", **fields: object) -> None:
        """Append an event on a node."""
        ahead_s = NOW_S + self.ahead_s[where]
        times = {key: value + ahead_s for key, value in fields.items() if isinstance(value, float)}
        event = {"kind": kind, "at_s": after_s + ahead_s, "lease_id": lease_id, **fields, **times}
        self.files[where] += json.dumps(event) + "\n"

    def report(self, where: str, after_s: float, *, size: int = 1 << 20, lost: int = 0) -> None:
        """Let a node send what is new in its file, after ``lost`` bytes that never come."""
        text = self.files[where].encode()
        offset = self.job.events.get(where, StreamCursor()).next_offset + lost
        self.send(where, after_s, offset, text[offset : offset + size].decode())

    def send(self, where: str, after_s: float, offset: int, text: str) -> None:
        chunk = StreamChunk(
            stream="events", offset=offset, next_offset=offset + len(text.encode()), text=text
        )
        now_s = NOW_S + after_s
        draft = Draft(self.state, now_s)
        draft.nodes[where] = replace(
            draft.nodes[where], last_seen_s=now_s, sent_at_s=now_s - WAY_S + self.ahead_s[where]
        )
        absorb_events(draft, "j0", where, (chunk,))
        measure(draft, "j0")
        self.state = draft.freeze()

    def trained(self) -> None:
        """Let the counters of all workers say that they train at the present width."""
        leases = {
            one.lease_id: replace(one, world_size=self.job.width, steps=1, first_step_end_s=NOW_S + 1)
            for one in self.state.leases.values()
        }
        self.state = replace(self.state, leases=leases)


def grow(head: Head, *, cold: bool = False) -> None:
    """Write a start at width 1 and, from second 20, a growth to 2 with its new worker on the other node."""
    head.decide(0.0, 1)
    head.write("n1", "granted", 0.1, generation=1, width=1)
    head.write("n1", "published", 0.2, generation=1, width=1)
    head.write("n1", "world", 3.0, "l0", world_size=1, rank=0)
    head.write("n1", "synced", 3.1, "l0", world_size=1)
    head.write("n1", "resumed", 3.3, "l0", world_size=1, last_step_end_s=None, first_step_end_s=3.3)
    head.report("n1", 4.0)
    head.report("n2", 4.1)
    head.decide(20.0, 2)
    head.write("n1", "granted", 20.1, generation=2, width=2)
    head.write("n1", "standby-started", 20.12, "l1", generation=2, cold=cold)
    head.write("n1", "standby-ready", 23.2, "l1", generation=2)
    head.write("n1", "committed", 23.25, "l0", commit=7, trigger="publication", bytes=10, write_s=0.01)
    head.write("n1", "published", 23.3, generation=2, width=2)
    head.write("n1", "interrupted", 23.4, "l0", world_size=1)
    head.write("n1", "assigned", 23.42, generation=2, width=2)
    for where, lease_id, late_s in (("n1", "l0", 0.0), ("n2", "l1", 0.005)):
        head.write(where, "world", 23.5 + late_s, lease_id, world_size=2)
        head.write(where, "synced", 23.52 + late_s, lease_id, world_size=2)
    head.write("n1", "resumed", 23.7, "l0", world_size=2, last_step_end_s=23.38, first_step_end_s=23.7)
    head.write("n2", "resumed", 23.7, "l1", world_size=2, last_step_end_s=None, first_step_end_s=23.701)


GOLDEN = """\
j0  j0  (tenant t)
seconds after the decision; TOOK is from the phase before

generation 1: starts 0 -> 1, applied
  decided 2023-11-14 22:13:20 UTC; first step after 3.320 s
  PHASE                  FROM  TO   TOOK
  granted               0.120      0.120
  published to Horovod  0.220      0.100
  rendezvous done       3.020      2.800  slowest
  state synced          3.120      0.100
  first step after      3.320      0.200

generation 2: grows 1 -> 2, warm, applied
  decided 2023-11-14 22:13:40 UTC; pause 0.220 s; first step after 3.720 s
  PHASE                  FROM     TO   TOOK
  granted               0.120         0.120
  standbys started      0.140         0.020
  standbys ready        3.220         3.080  slowest
  state committed       3.270         0.050
  published to Horovod  3.320         0.050
  last step before      3.400         0.080
  workers interrupted   3.420         0.020
  ranks assigned        3.440         0.020
  rendezvous done       3.520  3.525  0.085  2 times, last l1
  state synced          3.540  3.545  0.020  2 times, last l1
  first step after      3.720  3.721  0.175  2 times, last l1
  node n2: its clock is 300.0 s ahead of the head's; times are corrected by that
"""


def test_a_resize_is_told_phase_by_phase() -> None:
    """Every phase stands with its time after the decision, although a node is five minutes ahead."""
    head = Head({"n2": 300.0})
    grow(head)
    head.trained()
    head.report("n1", 25.0)
    head.report("n2", 25.1)
    view = {"job_id": "j0", "name": "j0", "tenant": "t", "resizes": [asdict(s) for s in head.stories]}
    text = "\n".join(resizes_lines(json.loads(json.dumps(view)), 20)) + "\n"
    assert text == GOLDEN


@pytest.mark.parametrize("clocks_s", [{}, {"n1": 300.0}, {"n2": -300.0}, {"n1": -86_400.0, "n2": 7.5}])
def test_clocks_change_no_timeline(clocks_s: dict[str, float]) -> None:
    """Whatever the clocks, and whichever node reports first: phases, pause and commits are the same."""
    true = Head()
    grow(true)
    true.trained()
    for where in ("n1", "n2"):
        true.report(where, 25.0)
    for order in (("n1", "n2"), ("n2", "n1")):
        head = Head(clocks_s)
        grow(head)
        head.trained()
        for where in order:
            head.report(where, 25.0)
        for seen, expected in zip(head.stories, true.stories, strict=True):
            assert close(seen) == close(expected)
            assert seen.pause_s == pytest.approx(expected.pause_s, abs=1e-5)
        assert head.stories[1].pause_s == pytest.approx(23.7 - 23.38 - STEP_S, abs=1e-5)
        assert head.job.num_commits == 1
        assert head.job.last_commit_s == pytest.approx(NOW_S + 23.25 + WAY_S, abs=1e-5)
        off = {name: -ahead_s for name, ahead_s in clocks_s.items()}
        assert head.stories[1].clocks_s == pytest.approx(off, abs=0.1)


def close(story: ResizeStory) -> tuple[object, ...]:
    phases = [
        (span.phase, round(span.first_after_s, 4), round(span.last_after_s, 4), span.count, span.slowest)
        for span in story.phases
    ]
    return story.number, story.kind, story.outcome, story.cold, phases


class SkewedCluster(VirtualCluster):
    """Nodes whose clocks are off by so many seconds; everything they say is by their clocks."""

    ahead_s: Mapping[str, float] = {}

    def make_report(self, node: str) -> AgentReport:
        report, ahead_s = super().make_report(node), self.ahead_s.get(node, 0.0)

        def moved(at_s: float | None) -> float | None:
            return None if at_s is None else at_s + ahead_s

        jobs = tuple(
            replace(
                job,
                leases=tuple(
                    replace(
                        one,
                        first_step_end_s=moved(one.first_step_end_s),
                        last_step_end_s=moved(one.last_step_end_s),
                        sampled_at_s=one.sampled_at_s + ahead_s,
                    )
                    for one in job.leases
                ),
            )
            for job in report.jobs
        )
        gpus = tuple(replace(gpu, sampled_at_s=gpu.sampled_at_s + ahead_s) for gpu in report.gpus)
        return replace(report, sent_at_s=report.sent_at_s + ahead_s, gpus=gpus, jobs=jobs)

    def _say_resumed(self, launch: _Launch, worker: _Worker, world_size: int, first_s: float) -> None:
        ahead_s = self.ahead_s.get(worker.node, 0.0)
        last_s = None if worker.last_s is None else worker.last_s + ahead_s
        super()._say_resumed(launch, replace(worker, last_s=last_s), world_size, first_s + ahead_s)


def test_a_job_across_skewed_nodes_lives_as_on_true_ones() -> None:
    """Clocks minutes apart change neither pauses nor rates nor any decision over a whole life."""
    policy = Policy(dwell_s=10.0, settle_s=2.0, window_s=5.0, decide_every_s=15.0, limit_steps=(1.0,))
    script = Script(rate_per_s=1000, efficiency=0.95, pause_s=4.0, total_samples=150_000)
    lives = []
    for ahead_s in ({}, {"n2": 300.0}, {"n1": -300.0, "n2": 200.0}):
        cluster = SkewedCluster({"n1": 1, "n2": 1}, policy=policy)
        cluster.ahead_s = ahead_s
        job_id = cluster.submit(script, widths=(1, 2))
        cluster.run(40)
        job = cluster.job(job_id)
        assert [story.outcome for story in resize_stories(job)] == [ResizeOutcome.APPLIED] * 2
        [second] = job.generations[1:]
        lives.append((cluster.widths[job_id], cluster.state.num_decisions, second.pause_s, job.rate_per_s))
    true = lives[0]
    assert true[2] == pytest.approx(4.0 - 0.1, abs=0.01)
    for life in lives[1:]:
        assert life[:2] == true[:2]
        assert life[2:] == pytest.approx(true[2:], rel=1e-4)


def pieces(text: str, sizes: Sequence[int]) -> Iterator[tuple[int, str]]:
    at, turn = 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        yield at, text[at : at + size]
        at, turn = at + size, turn + 1


def test_chunks_may_be_cut_repeated_mixed_and_lost() -> None:
    """However the files arrive, each line counts once; a lost chunk costs its own lines alone."""
    whole = Head()
    grow(whole)
    whole.trained()
    whole.report("n1", 25.0)
    whole.report("n2", 25.0)
    for sizes in ((1,), (7, 300, 64), (1000,)):
        head = Head()
        grow(head)
        head.trained()
        todo = {where: list(pieces(head.files[where], sizes)) for where in ("n1", "n2")}
        read = {where: head.job.events.get(where, StreamCursor()).next_offset for where in todo}
        while any(todo.values()):
            for where in ("n2", "n1"):
                for offset, text in todo[where][:1]:
                    assert offset >= 0
                    head.send(where, 25.0, offset, text)
                    head.send(where, 25.0, offset, text)
                    early = max(0, offset - 50)
                    head.send(where, 25.0, early, head.files[where][early : offset + len(text)])
                del todo[where][:1]
        assert read["n1"] > 0
        assert [close(story) for story in head.stories] == [close(story) for story in whole.stories]
    head = Head()
    grow(head)
    head.trained()
    head.report("n1", 25.0, lost=20)
    head.report("n2", 25.0)
    [_, second] = head.stories
    assert [span.phase for span in second.phases] == [span.phase for span in whole.stories[1].phases][1:]


HOSTILE = [
    "", "null", "[]", "{}", "7", '"x"', "{", '{"kind": 3}', '{"kind": null, "at_s": 1}', "[" * 50_000,
    '{"kind": "granted"}', '{"kind": "granted", "at_s": NaN, "generation": 1}',
    '{"kind": "granted", "at_s": 1e999, "generation": 1}',
    '{"kind": "granted", "at_s": -1e308, "generation": 1}',
    f'{{"kind": "granted", "at_s": {NOW_S + 1e6}, "generation": 1}}',
    f'{{"kind": "granted", "at_s": {NOW_S - 1e6}, "generation": 1}}',
    f'{{"kind": "granted", "at_s": {NOW_S + 1}, "generation": 99}}',
    f'{{"kind": "granted", "at_s": {NOW_S + 1}, "generation": -1}}',
    f'{{"kind": "granted", "at_s": {NOW_S + 1}, "generation": {"9" * 6000}}}',
    f'{{"kind": "granted", "at_s": {NOW_S + 1}, "generation": 1.5}}',
    f'{{"kind": "granted", "at_s": {NOW_S + 1}, "generation": "1"}}',
    f'{{"kind": "granted", "at_s": {NOW_S + 1}, "generation": 1, "lease_id": {{"a": 1}}}}',
    f'{{"kind": "stopped", "at_s": {NOW_S + 1}, "generation": 1, "world_size": 1}}',
    f'{{"kind": "world", "at_s": {NOW_S + 1}, "world_size": 5}}',
    f'{{"kind": "world", "at_s": {NOW_S + 1}, "world_size": -1}}',
    f'{{"kind": "resumed", "at_s": {NOW_S + 1}, "world_size": 1}}',
    f'{{"kind": "resumed", "at_s": {NOW_S + 1}, "world_size": 1, "first_step_end_s": 1e300}}',
    '{"kind": "committed", "at_s": 1e300}', '{"kind": "committed"}',
    f'{{"kind": "nonsense", "at_s": {NOW_S + 1}}}', "\ud800", '{"kind": "\ud800"}',
]  # fmt: skip


def test_hostile_lines_change_nothing() -> None:
    """Nothing that is not a plausible event of a known kind leaves a trace, or raises."""
    head = Head()
    head.decide(0.0, 1)
    head.report("n1", 1.0)
    before = replace(head.job, events={})
    for line in HOSTILE:
        draft = Draft(head.state, NOW_S + 1.0)
        chunk = StreamChunk(stream="events", offset=0, next_offset=10**6, text=f"{line}\n")
        absorb_events(draft, "j0", "n2", (chunk,))
        assert replace(draft.jobs["j0"], events={}) == before, line[:60]


def test_hostile_lines_are_bounded() -> None:
    """Long texts are cut, unknown leases are not named, lies about pauses do not go beyond the job's age."""
    head = Head()
    grow(head)
    head.trained()
    stop_s = f'"last_step_end_s": 1.0, "first_step_end_s": {NOW_S + 23.6}'
    ready = {"kind": "standby-ready", "at_s": NOW_S + 21, "generation": 2}
    lies = [
        json.dumps({"kind": "cold", "why": "x\x1b\ud800 " * 100_000}),
        json.dumps({"kind": "standby-failed", "at_s": NOW_S + 21, "generation": 2, "why": "y" * 10**6}),
        f'{{"kind": "resumed", "world_size": 2, "at_s": 0, "lease_id": "mine", {stop_s}}}',
        *[json.dumps({**ready, "lease_id": str(n)}) for n in range(2000)],
    ]  # fmt: skip
    head.files["n2"] = "\n".join(lies) + "\n" + head.files["n2"]
    head.report("n2", 25.0, size=1 << 30)
    head.report("n1", 25.0)
    [_, second] = head.stories
    assert len(second.why) == MAX_TEXT_CHARS
    assert len(head.job.cold) <= MAX_TEXT_CHARS
    assert second.pause_s is not None
    assert second.pause_s < 1.0
    assert len(head.job.resizes[-1].marks) <= 2 * len(ResizePhase)
    assert {span.last_lease_id for span in second.phases} <= {"", "l0", "l1"}
    assert max(span.count for span in second.phases) < 100
    assert len(str(job_row(head.job)["document"])) < 20_000


def test_a_recovery_is_no_resize() -> None:
    """A world that forms anew at a width that was trained at leaves the timeline and the pauses alone."""
    head = Head()
    grow(head)
    head.trained()
    head.report("n1", 25.0)
    head.report("n2", 25.0)
    before, pauses = head.stories, head.state.estimates
    for where, lease_id in (("n1", "l0"), ("n2", "l1")):
        head.write(where, "interrupted", 60.0, lease_id, world_size=2)
        head.write(where, "world", 61.0, lease_id, world_size=2)
        head.write(where, "synced", 61.1, lease_id, world_size=2)
        last_s = 59.0 if where == "n1" else None
        head.write(
            where, "resumed", 62.0, lease_id, world_size=2, last_step_end_s=last_s, first_step_end_s=62.0
        )
        head.write(where, "left", 62.5, lease_id, world_size=2)
        head.report(where, 63.0)
    head.write("n1", "world-restarted", 70.0, generation=2, why="all workers died", restarts=1)
    head.write("n1", "published", 70.1, generation=2, width=2)
    head.report("n1", 71.0)
    assert head.stories == before
    assert head.state.estimates == pauses


def outcomes(head: Head) -> list[tuple[ResizeKind, int, ResizeOutcome | None]]:
    return [(story.kind, story.width_before, story.outcome) for story in head.stories]


def test_outcomes() -> None:
    """What was not applied says what became of it, and the width before is the one trained at."""
    head = Head()
    grow(head)
    head.trained()
    head.report("n1", 25.0)
    head.report("n2", 25.0)
    assert outcomes(head)[1] == (ResizeKind.GROW, 1, ResizeOutcome.APPLIED)
    head.decide(30.0, 4)
    assert outcomes(head)[2:] == [(ResizeKind.GROW, 2, None)]
    head.write("n1", "standby-started", 30.2, "l3", generation=3)
    head.write("n1", "standby-failed", 31.0, "l3", generation=3, exit_code=1, code="HW-X", why="no disk")
    head.report("n1", 32.0)
    head.decide(33.0, 2)
    assert outcomes(head)[2] == (ResizeKind.GROW, 2, ResizeOutcome.WITHDRAWN)
    assert (head.stories[2].code, head.stories[2].why) == ("HW-X", "no disk")
    head.trained()
    head.report("n1", 34.0)
    assert outcomes(head)[3] == (ResizeKind.SAME_WIDTH, 2, ResizeOutcome.APPLIED)
    assert head.stories[3].first_step_after_s is None
    head.decide(40.0, 3)
    head.decide(42.0, 4)
    assert outcomes(head)[4:] == [
        (ResizeKind.GROW, 2, ResizeOutcome.SUPERSEDED),
        (ResizeKind.GROW, 2, None),
    ]
    head.write("n1", "published", 43.0, generation=6, width=4)
    head.write("n1", "world-restarted", 50.0, generation=6, why="a worker died", restarts=1)
    head.report("n1", 51.0)
    assert outcomes(head)[5] == (ResizeKind.GROW, 2, ResizeOutcome.FAILED)
    head.decide(60.0, 1, start=True)
    assert outcomes(head)[6] == (ResizeKind.START, 0, None)
    for phase, ending, outcome in (
        (JobPhase.STOPPING, JobPhase.QUEUED, ResizeOutcome.FAILED),
        (JobPhase.STOPPING, JobPhase.CANCELLED, ResizeOutcome.WITHDRAWN),
        (JobPhase.FAILED, None, ResizeOutcome.FAILED),
    ):
        head.put(replace(head.job, phase=phase, ending=ending))
        assert outcomes(head)[6] == (ResizeKind.START, 0, outcome)


def test_cold_is_said_until_the_next_start() -> None:
    """Why new workers start cold is kept for the life of the launcher that says it."""
    head = Head()
    head.decide(0.0, 1)
    head.write("n1", "cold", 0.1, why="the command is not a Python script")
    head.report("n1", 1.0)
    assert head.job.cold == "the command is not a Python script"
    assert pause_kind(head.job, 2) is PauseKind.GROW_COLD
    head.decide(20.0, 2)
    head.report("n1", 21.0)
    assert head.job.cold
    head.decide(50.0, 1, start=True)
    head.report("n1", 51.0)
    assert head.job.cold == ""
    assert pause_kind(head.job, 2) is PauseKind.GROW_WARM


def test_a_thousand_resizes_leave_a_bounded_record() -> None:
    """Only the latest timelines are kept, by the head's clock but for the latest one."""
    head = Head({"n2": 300.0})
    head.decide(0.0, 1)
    for n in range(1, 1001):
        head.decide(10.0 * n, 1 + n % 4)
        head.write("n1", "published", 10.0 * n + 1, generation=n + 1, width=1 + n % 4)
        head.write("n2", "world", 10.0 * n + 2, "l1", world_size=1 + n % 4)
        if n % 10 == 0:
            head.report("n1", 10.0 * n + 3)
            head.report("n2", 10.0 * n + 3)
    assert [resize.number for resize in head.job.resizes] == list(range(1002 - KEPT_RESIZES, 1002))
    assert all(not mark.node for resize in head.job.resizes[:-1] for mark in resize.marks)
    assert all(len(resize.marks) == 2 for resize in head.job.resizes)
    small = replace(head.job, generations=())
    assert len(str(job_row(small)["document"])) < 20_000
    for story in head.stories:
        [published, world] = story.phases
        assert published.first_after_s == pytest.approx(1 + WAY_S, abs=1e-3)
        assert world.took_s == pytest.approx(1, abs=1e-3)


def test_pauses_are_expected_by_kind() -> None:
    """The pause of a kind is the median of that kind's, else of all, else the prior."""
    policy, known = Policy(), JobEstimate()
    assert expected_pause_s(known, policy, PauseKind.SHRINK) == policy.prior_pause_s
    for pause_s in (6.0, 7.0, 8.0):
        known = observe_pause(known, pause_s, PauseKind.GROW_COLD)
    known = observe_pause(known, 0.2, PauseKind.SHRINK)
    assert expected_pause_s(known, policy, PauseKind.SHRINK) == 0.2
    assert expected_pause_s(known, policy, PauseKind.GROW_COLD) == 7.0
    assert expected_pause_s(known, policy, PauseKind.GROW_WARM) == expected_pause_s(known, policy) == 7.0
    for cold, kind in ((False, PauseKind.GROW_WARM), (True, PauseKind.GROW_COLD)):
        head = Head()
        grow(head, cold=cold)
        head.trained()
        head.report("n1", 25.0)
        head.report("n2", 25.0)
        assert set(head.state.estimates["j0"].kind_pauses_s) == {kind}


def test_a_clock_is_known_by_its_quickest_report() -> None:
    """Slow reports do not move a clock; one that was set, forward or back, is found out."""
    clock = None
    at_s = NOW_S

    def hear(ahead_s: float, way_s: float) -> float:
        nonlocal clock, at_s
        at_s += 1.0
        clock = observe_clock(clock, at_s + ahead_s - way_s, at_s)
        assert clock is not None
        return clock.offset_s

    assert hear(0.0, 3.0) == pytest.approx(3.0)
    assert hear(0.0, 0.01) == pytest.approx(0.01)
    for n in range(3 * STRETCH_REPORTS):
        way_s = 4.0 if n % 3 else 0.02
        assert hear(0.0, way_s) == pytest.approx(0.01 if n < STRETCH_REPORTS - 2 else 0.02, abs=0.011)
    assert hear(300.0, 0.02) == pytest.approx(-299.98)
    for _ in range(SET_BACK_REPORTS - 1):
        assert hear(0.0, 0.02) == pytest.approx(-299.98)
    assert hear(0.0, 0.02) == pytest.approx(0.02)
    assert observe_clock(clock, clock.sent_at_s if clock else 0.0, at_s + 99) is clock
    for nonsense in (float("inf"), float("-inf"), float("nan"), -1e300):
        assert observe_clock(None, nonsense, at_s) is None
