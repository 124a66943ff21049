# SPDX-License-Identifier: Apache-2.0
"""Repairs of Horovod's state and samplers, on real Horovod with one worker."""

import importlib.metadata
import subprocess
import sys
import textwrap

import pytest

from horowatt.elastic import horovod_fixes
from horowatt.errors import NeedsOperator

PRELUDE = """
from contextlib import nullcontext
from horowatt.elastic import horovod_fixes, import_hooks
import_hooks.install(horovod_fixes.worker_hooks(
    on_world=lambda *_: None, on_leave=lambda: None, uncounted=nullcontext))
import horovod.torch as hvd
import torch
hvd.init()
"""


def _run(body: str) -> None:
    script = PRELUDE + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "optimizer",
    [
        "torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)",
        "torch.optim.SGD(parameters, lr=0.1, weight_decay=0.5)",
        "torch.optim.SGD(parameters, lr=0.1, weight_decay=0.5, momentum=0.9)",
        "hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1, weight_decay=0.5, momentum=0.9))",
    ],
)
def test_creating_an_optimizers_state_changes_no_parameter(optimizer: str) -> None:
    """A newcomer that synchronises keeps parameters, gradients and weight decay as they were."""
    _run(
        f"""
        frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        parameters = [torch.nn.Parameter(torch.ones(3)), frozen]
        optimizer = {optimizer}
        parameters[0].grad = torch.full((3,), 5.0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert all(torch.equal(p, torch.ones_like(p)) for p in parameters), parameters
        assert torch.equal(parameters[0].grad, torch.full((3,), 5.0))
        assert parameters[1].grad is None
        assert optimizer.param_groups[0]["weight_decay"] == 0.5
        """
    )


def test_an_update_without_a_commit_keeps_the_present_state() -> None:
    """The state that is synchronised after an update is the present one, and nobody skips that."""
    _run(
        """
        from horovod.common.exceptions import HostsUpdatedInterrupt
        from horovod.runner.elastic.worker import HostUpdateResult
        model = torch.nn.Linear(2, 1)
        state = hvd.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=0)
        state.batch = 70
        state.on_hosts_updated(1.5, HostUpdateResult.removed)
        try:
            state.check_host_updates()
        except HostsUpdatedInterrupt as interrupt:
            assert not interrupt.skip_sync
        else:
            raise AssertionError("no interrupt")
        state.sync()
        assert state.batch == 70, state.batch
        """
    )


def test_another_version_of_horovod_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patches are applied only to the version that they were tested with."""
    horovod_fixes.require_tested_version()
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.29.0")
    with pytest.raises(NeedsOperator) as caught:
        horovod_fixes.require_tested_version()
    assert caught.value.code == "HW-JOB-007"
    assert "0.29.0" in caught.value.message


def test_every_fix_says_what_goes_wrong_without_it() -> None:
    """The list of fixes is complete enough to be read by somebody who has to remove one."""
    names = [fix.name for fix in horovod_fixes.FIXES]
    assert len(set(names)) == len(names) >= 9
    assert all(len(fix.reason.split()) > 8 and fix.where for fix in horovod_fixes.FIXES)
