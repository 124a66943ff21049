# SPDX-License-Identifier: Apache-2.0
"""Each sample of an epoch exactly once, whatever resizes happen, in scripts that know nothing of it.

Horovod's ``ElasticSampler`` counts the processed samples as a prefix of one shuffled order. A *deal* is what
is left of that order, dealt to the workers of one world in steps: step k of all workers together is exactly
the next slice of the order, so what was processed is a prefix at any time and on any worker. The last, short
step is spread evenly. A worker for which nothing is left in a step gets one *padding* sample, because it must
take part in the collectives; it weighs nothing and is not counted.

Where the shares of a step differ, gradients are weighted by them as they come out of the backward pass:
every worker knows all shares from the plan, and Horovod's average becomes that over samples.

What a worker trains on is told by the order in which a ``DataLoader`` hands batches out, never by what
its sampler was asked for: loading processes run ahead. A script that itself fetches batches ahead shows it by
how many it has at its first backward pass.

Nothing here imports PyTorch or Horovod before a script has. All of it holds for the training thread; hooks of
gradients may run in a thread of PyTorch's while that one waits.
"""

import functools
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType
from typing import Any, TypeVar

from horowatt.elastic import import_hooks
from horowatt.errors import InvalidInput
from horowatt.records import BatchRule, LaunchSpec

LR_RULE_VARIABLE = "HOROWATT_LR_RULE"
LR_WIDTH_VARIABLE = "HOROWATT_LR_WIDTH"
LOSS_VARIABLE = "HOROWATT_LOSS"
WIDTH_KEY = "horowatt_width"
"""Key in an optimizer's ``param_groups``: the width that the group's learning rate belongs to."""
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""What grows with the learning rate in a parameter group; the last three are of PyTorch's schedulers."""
_DISTRIBUTED = "horovod.torch.optimizer"


# --------------------------------------------------------------------------------------- settings


class LrRule(StrEnum):
    """How the learning rate follows the width when the batch per worker stays the same."""

    NONE = "none"
    LINEAR = "linear"
    SQRT = "sqrt"

    def factor(self, width: int) -> float:
        """Return what the learning rate is multiplied by at a width, relative to width 1."""
        if self is LrRule.LINEAR:
            return float(width)
        return math.sqrt(width) if self is LrRule.SQRT else 1.0


class Loss(StrEnum):
    """How a script's loss puts the samples of a batch together."""

    MEAN = "mean"
    SUM = "sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a job says about its batches.

    Attributes:
        batch_rule: What stays the same when the width changes.
        batch_size: Samples of one step, of one worker or of all by ``batch_rule``; None when not declared.
        lr_rule: What happens to learning rates when the width changes; only without a total batch.
        lr_width: Width that the learning rate in the script is meant for; None for the one it starts with.
        loss: With ``SUM`` gradients are not weighted, because they are sums over samples already.
    """

    batch_rule: BatchRule = BatchRule.PER_WORKER
    batch_size: int | None = None
    lr_rule: LrRule = LrRule.NONE
    lr_width: int | None = None
    loss: Loss = Loss.MEAN

    @property
    def total_batch(self) -> int | None:
        """Samples of one step of all workers together, when that is what stays the same."""
        return self.batch_size if self.batch_rule is BatchRule.TOTAL else None

    @staticmethod
    def of_job(spec: LaunchSpec | None, environment: Mapping[str, str]) -> "Settings":
        """Return the settings of a job and of the environment of its workers.

        Raises:
            InvalidInput: ``HW-DATA-001`` for a variable that cannot be used.
        """
        rule = _choice(environment, LR_RULE_VARIABLE, LrRule)
        if spec is not None and spec.batch_rule is BatchRule.TOTAL and rule is not LrRule.NONE:
            _say_once(f"{LR_RULE_VARIABLE}={rule} has no effect: the batch of all workers stays the same")
            rule = LrRule.NONE
        return Settings(
            batch_rule=spec.batch_rule if spec is not None else BatchRule.PER_WORKER,
            batch_size=spec.batch_size if spec is not None else None,
            lr_rule=rule,
            lr_width=_width(environment),
            loss=_choice(environment, LOSS_VARIABLE, Loss),
        )


_Choice = TypeVar("_Choice", bound=StrEnum)


def _choice(environment: Mapping[str, str], name: str, kind: type[_Choice]) -> _Choice:
    choices = list(kind)
    value = environment.get(name) or choices[0].value
    if value not in choices:
        raise _bad_variable(name, value, f"use one of {', '.join(choices)}")
    return kind(value)


def _width(environment: Mapping[str, str]) -> int | None:
    value = environment.get(LR_WIDTH_VARIABLE) or None
    if value is None:
        return None
    if not (value.isdecimal() and value.isascii() and int(value) > 0):
        raise _bad_variable(LR_WIDTH_VARIABLE, value, "give the number of workers the learning rate is for")
    return int(value)


def _bad_variable(name: str, value: str, hint: str) -> InvalidInput:
    return InvalidInput(
        "HW-DATA-001",
        f"the environment variable {name} of this job cannot be used",
        because=f"its value is {value!r}",
        hint=hint,
        fields={name: value},
    )


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        sys.stderr.write(f"horowatt: {text}\n")


# ------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True, slots=True)
class Plan:
    """How samples are dealt to workers in steps.

    Attributes:
        remaining: Samples to deal.
        width: Workers.
        batch: Samples of one full step of all workers together.
        steps: Steps that every worker makes.
        dealt: Samples that these steps use up: all, unless an incomplete last step is dropped.
        first_uneven: First step in which the workers' shares differ; ``steps`` when there is none. They may
            differ in all later ones.
    """

    remaining: int
    width: int
    batch: int
    steps: int
    dealt: int
    first_uneven: int

    def done(self, steps: int) -> int:
        """Return the samples that the first ``steps`` steps use up."""
        return min(steps * self.batch, self.dealt)

    def size(self, step: int) -> int:
        """Return the samples of one step of all workers."""
        return self.done(step + 1) - self.done(step)

    def share(self, step: int, rank: int) -> int:
        """Return the samples of one step of one worker; 0 when it gets padding instead."""
        return max(0, -(-(self.size(step) - rank) // self.width))

    def positions(self, step: int, rank: int) -> range:
        """Return which of the remaining samples a worker gets in a step: its share, or the padding."""
        begin, end = self.done(step), self.done(step + 1)
        if begin + rank < end:
            return range(begin + rank, end, self.width)
        return range(begin, begin + 1)

    def weight(self, step: int, rank: int) -> float:
        """Return what a worker's mean over its share counts in the average over workers; 1 when even."""
        return self.share(step, rank) * self.width / self.size(step)


def plan(remaining: int, width: int, batch: int, *, drop_last: bool = False) -> Plan:
    """Return how samples are dealt to ``width`` workers, in steps of ``batch`` samples of all together."""
    full, rest = divmod(remaining, batch)
    steps = full if drop_last or rest == 0 else full + 1
    first_uneven = steps
    if full and batch % width:
        first_uneven = 0
    elif steps > full and rest % width:
        first_uneven = full
    return Plan(
        remaining=remaining,
        width=width,
        batch=batch,
        steps=steps,
        dealt=min(steps * batch, remaining),
        first_uneven=first_uneven,
    )


class Deal:
    """One pass over what is left of an epoch on one worker, and how far that worker has come.

    Attributes:
        handed: Batches that a ``DataLoader`` has handed out.
        recorded: Of these, batches that were trained and recorded.
        lag: Batches the script fetches ahead of training; None until its first backward pass.
    """

    __slots__ = (
        "_assumed_stop",
        "_closer",
        "_recorded_samples",
        "_stepper",
        "_stops",
        "_weight",
        "_weight_of",
        "automatic",
        "base",
        "handed",
        "lag",
        "order",
        "plan",
        "rank",
        "recorded",
        "round",
    )

    def __init__(self, sampler: Any, plan_: Plan) -> None:
        self.order: list[int] = sampler.remaining_indices
        self.plan = plan_
        self.rank: int = sampler.rank
        self.base = len(sampler.dataset) - len(self.order)
        self.round: object = sampler._horowatt_round  # noqa: SLF001 - our own attribute
        self.automatic: bool = getattr(sampler, "_horowatt_automatic", False)
        self.handed = 0
        self.recorded = 0
        self.lag: int | None = None
        self._recorded_samples = 0
        self._stops = 0
        self._assumed_stop = False
        self._stepper = 0
        self._closer = 0
        self._weight = 1.0
        self._weight_of = -1

    def indices(self, step: int) -> list[int]:
        """Return the indices that this worker gets in a step."""
        positions = self.plan.positions(step, self.rank)
        return self.order[positions.start : positions.stop : positions.step]

    def regular(self) -> tuple[int, int, int]:
        """Return samples of each step but the last, steps, and samples the last lacks; without padding."""
        plan_ = self.plan
        if plan_.steps == 0:
            return 0, 0, 0
        full = max(0, -(-(plan_.batch - self.rank) // plan_.width))
        return full, plan_.steps, full - plan_.share(plan_.steps - 1, self.rank)

    @property
    def processed(self) -> int:
        """How long a prefix of the epoch's order has been trained, by all workers together."""
        return self.base + self.plan.done(self.recorded)

    @property
    def is_padding(self) -> bool:
        """True when the batch handed out last is padding."""
        return self.handed > 0 and self.plan.share(self.handed - 1, self.rank) == 0

    # The order of events: what was handed out, what is trained, what was trained.

    def hand_out(self) -> None:
        """Note that a batch was handed out."""
        self.handed += 1
        self._closer = self._stepper

    def stop(self) -> bool:
        """Note that there are no more batches; return True when the last one was trained already."""
        if self._assumed_stop:
            self._assumed_stop = False
        else:
            self._stops += 1
        return self.lag == 0 or (self.lag is None and self.handed != 1)

    def trained(self) -> int:
        """Return the step whose batch is being trained, or was trained last."""
        step = self.handed + self._stops - 1 - (self.lag or 0)
        return max(0, min(step, self.handed - 1))

    def weight(self) -> float:
        """Return the weight of the gradients of the batch that is being trained."""
        if self.lag is None:
            self.lag = self.handed + self._stops - 1
        step = self.trained()
        if step != self._weight_of:
            self._weight, self._weight_of = self.plan.weight(step, self.rank), step
        return self._weight

    def end_step(self, optimizer: object) -> bool:
        """Note that an optimizer made its step; return True when nothing is left to train."""
        self._stepper = id(optimizer)
        if self.automatic:
            self.recorded = max(self.recorded, self.trained() + 1)
        if self._stops == 0 or self._closer not in (0, self._stepper):
            return False
        last = self.trained() == self.handed - 1
        # A script that fetches further ahead may ask again before the next step, or just go on.
        self._stops += 1
        self._assumed_stop = True
        return last

    def record(self, batch_idx: object, batch_size: object) -> None:
        """Note that the script recorded a batch: the one that was trained, whatever it passes."""
        samples = batch_size if isinstance(batch_size, int) else 0
        if self.handed == 0:
            # Something of the user's own stands between the sampler and the training.
            self._recorded_samples += samples
            full = max(1, self.plan.share(0, self.rank)) if self.plan.steps else 1
            self.recorded = min(self.plan.steps, -(-self._recorded_samples // full))
            return
        outstanding = self.handed - self.recorded
        own = max(1, self.plan.share(self.recorded, self.rank)) if outstanding > 0 else 1
        if isinstance(batch_idx, int) and batch_idx + 1 == self.handed and outstanding > 1:
            self.lag = 0
        elif outstanding > 1 and round(samples / own) < outstanding:
            trained = self.recorded + max(1, round(samples / own))
            self.recorded = max(self.recorded, trained if self.lag is None else self.trained() + 1)
            return
        self.recorded = self.handed


class Batches(Iterator[list[int]]):
    """The batches of a deal: lists of indices. A ``DataLoader`` that holds it is known by its deal."""

    def __init__(self, deal: Deal, sampler: Any) -> None:
        self.horowatt_deal = deal
        self.sampler = sampler
        self._steps = iter(range(deal.plan.steps))

    def __next__(self) -> list[int]:
        return self.horowatt_deal.indices(next(self._steps))


class Items(Iterator[int]):
    """The indices of a deal in which each worker gets one per step."""

    def __init__(self, deal: Deal, sampler: Any) -> None:
        self.horowatt_deal = deal
        self.sampler = sampler
        self._batches = Batches(deal, sampler)

    def __next__(self) -> int:
        return next(self._batches)[0]


_DEALT = (Batches, Items)


def _sampler_of(loader: object) -> Any:
    """Return the sampler of single indices behind a ``DataLoader``."""
    source = getattr(loader, "_index_sampler", None)
    return getattr(source, "sampler", source)


# ----------------------------------------------------------------------------------------- dealer


class Dealer:
    """Deals in one process: knows what is trained at present, and weighs its gradients.

    Attributes:
        current: The deal whose batches are being trained, if any.
        latest: The deal that handed out a batch last, with gradients enabled.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.current: Deal | None = None
        self.latest: Deal | None = None
        self._sampler: Any = None
        self._sampler_class: type | None = None
        self._planned_iter: Callable[[Any], Iterator[int]] | None = None
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._armed: list[Any] = []
        self._armed_for = 0
        self._grad_enabled: Callable[[], bool] = lambda: True
        if settings.batch_rule is BatchRule.TOTAL and settings.batch_size is None:
            _say_once("the job's total batch is not known, so loaders keep their own batch per worker")

    # ------------------------------------------------------------------------------------ planning

    def deals(self, sampler: object) -> bool:
        """Return True for a sampler that is dealt by a plan: Horovod's, with its own order."""
        return (
            self._sampler_class is not None
            and isinstance(sampler, self._sampler_class)
            and type(sampler).__iter__ is self._planned_iter  # type: ignore[attr-defined]
        )

    def plan_for(self, sampler: Any, batch_size: int, *, drop_last: bool) -> Plan:
        """Return the plan of a sampler for a loader with a batch per worker of its own."""
        width = max(1, sampler.num_replicas)
        total: int | None = getattr(sampler, "_horowatt_total", None)
        if total is None and self._grad_enabled():
            total = self.settings.total_batch
        if total is None:
            total = width * self._agreed(sampler, batch_size)
        return plan(len(sampler.remaining_indices), width, total, drop_last=drop_last)

    def batches(self, sampler: Any, batch_size: int, *, drop_last: bool) -> Batches:
        """Begin a deal in batches."""
        found = self.plan_for(sampler, batch_size, drop_last=drop_last)
        sampler._horowatt_batch = self._agreed(sampler, batch_size)  # noqa: SLF001
        return Batches(self._begin(sampler, found), sampler)

    def items(self, sampler: Any) -> Items:
        """Begin a deal in single samples, for whoever does not use PyTorch's ``BatchSampler``."""
        width = max(1, sampler.num_replicas)
        return Items(self._begin(sampler, plan(len(sampler.remaining_indices), width, width)), sampler)

    @staticmethod
    def _begin(sampler: Any, found: Plan) -> Deal:
        deal = Deal(sampler, found)
        known = sampler._horowatt_deal  # noqa: SLF001
        if known is None or known.handed == 0:
            sampler._horowatt_deal = deal  # noqa: SLF001
        return deal

    @staticmethod
    def _agreed(sampler: Any, mine: int) -> int:
        """Return the batch per worker that all workers use: where they differ, that of rank 0."""
        instead: dict[int, int] | None = sampler._horowatt_instead  # noqa: SLF001
        agreed: int | None = sampler._horowatt_agreed  # noqa: SLF001
        if instead is None:
            instead = {} if agreed is None or agreed == mine else {mine: agreed}
            if agreed is not None:
                sampler._horowatt_instead = instead  # noqa: SLF001
        if mine in instead:
            _say_once(
                f"batch size {instead[mine]} of rank 0 is used instead of {mine}: all workers need the same; "
                "submit the job with --batch-rule total if the batch of all workers should stay the same"
            )
        return instead.get(mine, mine)

    @staticmethod
    def agree(sampler: Any, broadcast_object: Callable[[Any], Any]) -> None:
        """Let all workers know the batch size that rank 0 used last; part of a synchronisation."""
        # In a box, because Horovod names the broadcast by the type of what is sent.
        (sampler._horowatt_agreed,) = broadcast_object((sampler._horowatt_batch,))  # noqa: SLF001
        sampler._horowatt_instead = None  # noqa: SLF001

    # -------------------------------------------------------------------------------------- events

    def handed_out(self, source: Batches | Items) -> None:
        """Note that a loader handed out a batch of a deal. Short, because it runs once per step."""
        deal = source.horowatt_deal
        deal.hand_out()
        if not self._grad_enabled():
            return
        self.latest = deal
        if deal is not self.current:
            sampler = source.sampler
            if deal.round is not sampler._horowatt_round:  # noqa: SLF001
                return
            sampler._horowatt_deal = deal  # noqa: SLF001
            self.current, self._sampler = deal, sampler
        if deal.lag is None or deal.handed > deal.plan.first_uneven:
            self._arm()
        elif self._armed:
            self._disarm()

    def exhausted(self, deal: Deal) -> None:
        """Note that a loader has no more batches."""
        if deal.stop() and deal is self.current:
            self.end()

    def end(self) -> None:
        """Note that what comes next is not trained on the present deal: a new epoch, another world."""
        self.current = self._sampler = None
        self._disarm()

    def end_step(self, optimizer: object) -> None:
        """Note that an optimizer made its step."""
        deal = self.current
        if deal is None:
            return
        over = deal.end_step(optimizer)
        if deal.automatic:
            self._sampler.processed_num = deal.processed
        if over:
            self.end()

    def end_plain_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Note a step of an optimizer that is not Horovod's; a post hook of all optimizers."""
        if type(optimizer).__module__ != _DISTRIBUTED:
            self.end_step(optimizer)

    # ------------------------------------------------------------------------------------- weights

    def weigh(self, optimizer: Any) -> None:
        """Weigh the gradients that an optimizer of Horovod's averages."""
        mpi_ops = sys.modules["horovod.torch.mpi_ops"]
        everybody = optimizer.process_set.process_set_id == 0
        if everybody and optimizer.op in (mpi_ops.Average, mpi_ops.Sum):
            self._optimizers.add(optimizer)

    def _arm(self) -> None:
        if self._armed_for == len(self._optimizers):
            return
        self._disarm()
        seen = set()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad and id(parameter) not in seen:
                        seen.add(id(parameter))
                        self._armed.append(parameter.register_hook(self._on_gradient))
        self._armed_for = len(self._optimizers)

    def _disarm(self) -> None:
        for handle in self._armed:
            handle.remove()
        self._armed.clear()
        self._armed_for = 0

    def _weighted(self, grad: Any) -> Any:
        deal = self.current
        if deal is None:
            return None
        weight = deal.weight()
        if self.settings.loss is Loss.SUM:
            weight = min(1.0, math.ceil(weight))
        if weight == 1.0:
            return None
        if weight == 0.0:
            # What padding makes of a gradient may be infinite or not a number.
            return sys.modules["torch"].zeros_like(grad)
        return grad * weight

    @functools.cached_property
    def _on_gradient(self) -> Callable[[Any], Any]:
        def on_gradient(grad: Any) -> Any:
            return self._weighted(grad)

        # Saving a model with its hooks would try to save this as well.
        on_gradient.__torch_unserializable__ = True  # type: ignore[attr-defined]
        return on_gradient

    # --------------------------------------------------------------------------------------- hooks

    def hooks(self) -> Mapping[str, import_hooks.Hook]:
        """Return what to do to modules of PyTorch and Horovod, by module name."""
        return {
            "torch.utils.data.sampler": self._patch_batches,
            "torch.utils.data.dataloader": self._patch_loaders,
            "horovod.torch.elastic.sampler": self._patch_sampler,
            "horovod.torch.optimizer": self._patch_optimizers,
            "horovod.torch.elastic.state": self._patch_state,
        }

    def _patch_sampler(self, module: ModuleType) -> None:
        dealer = self
        sampler_class = module.ElasticSampler
        reset, record = sampler_class.reset, sampler_class.record_batch

        def planned_iter(sampler: Any) -> Iterator[int]:
            return dealer.items(sampler)

        @functools.wraps(reset)
        def planned_reset(sampler: Any) -> None:
            reset(sampler)
            if sampler._horowatt_deal is dealer.current:  # noqa: SLF001
                dealer.end()
            sampler._horowatt_deal = None  # noqa: SLF001
            sampler._horowatt_round = object()  # noqa: SLF001

        @functools.wraps(record)
        def exact_record(sampler: Any, batch_idx: Any, batch_size: Any) -> None:
            deal: Deal | None = sampler._horowatt_deal  # noqa: SLF001
            if deal is not None:
                deal.record(batch_idx, batch_size)
                sampler.processed_num = deal.processed
            else:
                record(sampler, batch_idx, batch_size)
                sampler.processed_num = min(sampler.processed_num, len(sampler.dataset))

        sampler_class._horowatt_deal = None  # noqa: SLF001
        sampler_class._horowatt_round = None  # noqa: SLF001
        sampler_class._horowatt_batch = None  # noqa: SLF001
        sampler_class._horowatt_agreed = None  # noqa: SLF001
        sampler_class._horowatt_instead = None  # noqa: SLF001
        sampler_class.reset = planned_reset
        sampler_class.record_batch = exact_record
        sampler_class.__iter__ = planned_iter
        self._planned_iter = planned_iter
        self._sampler_class = sampler_class

    def _patch_batches(self, module: ModuleType) -> None:
        dealer = self
        batches = module.BatchSampler
        original_iter, original_len = batches.__iter__, batches.__len__

        @functools.wraps(original_iter)
        def __iter__(self: Any) -> Iterator[list[int]]:  # noqa: N807
            if dealer.deals(self.sampler):
                return dealer.batches(self.sampler, self.batch_size, drop_last=self.drop_last)
            found: Iterator[list[int]] = original_iter(self)
            return found

        @functools.wraps(original_len)
        def __len__(self: Any) -> int:  # noqa: N807
            if dealer.deals(self.sampler):
                return dealer.plan_for(self.sampler, self.batch_size, drop_last=self.drop_last).steps
            found: int = original_len(self)
            return found

        batches.__iter__ = __iter__
        batches.__len__ = __len__

    def _patch_loaders(self, module: ModuleType) -> None:
        dealer = self
        base = module._BaseDataLoaderIter  # noqa: SLF001 - the one class that all iterators share
        original_init, original_next = base.__init__, base.__next__
        self._grad_enabled = sys.modules["torch"].is_grad_enabled

        @functools.wraps(original_init)
        def __init__(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            dealer._look_at(loader)
            original_init(iterator, loader, *args, **kwargs)

        @functools.wraps(original_next)
        def __next__(iterator: Any) -> Any:  # noqa: N807
            try:
                batch = original_next(iterator)
            except StopIteration:
                source = getattr(iterator, "_sampler_iter", None)
                if isinstance(source, _DEALT):
                    dealer.exhausted(source.horowatt_deal)
                raise
            source = getattr(iterator, "_sampler_iter", None)
            if isinstance(source, _DEALT):
                dealer.handed_out(source)
            return batch

        base.__init__ = __init__
        base.__next__ = __next__

    def _look_at(self, loader: Any) -> None:
        """Say what an iterator over a loader is about to do wrong, or prevent it."""
        sampler = _sampler_of(loader)
        if self.deals(sampler):
            if getattr(loader, "in_order", True) is False:
                _say_once("batches are handed out in order: what was trained is known by that order")
                loader.in_order = True
            return
        distributed = sys.modules.get("torch.utils.data.distributed")
        if (
            distributed is not None
            and isinstance(sampler, distributed.DistributedSampler)
            and os.environ.get("HOROVOD_ELASTIC") == "1"
            and self._grad_enabled()
        ):
            _say_once(
                "this script trains with torch's DistributedSampler, which does not know of resizes: after "
                "one it keeps the old number of workers and begins its epoch again, so samples are left out "
                "or trained twice; hvd.elastic.ElasticSampler, kept in the state, trains each exactly once"
            )

    def _patch_optimizers(self, module: ModuleType) -> None:
        dealer = self
        plain, adasum = module._DistributedOptimizer, module._DistributedAdasumOptimizer  # noqa: SLF001
        register = plain._register_hooks  # noqa: SLF001

        @functools.wraps(register)
        def register_and_weigh(optimizer: Any) -> None:
            register(optimizer)
            dealer.weigh(optimizer)

        plain._register_hooks = register_and_weigh  # noqa: SLF001
        for distributed in (plain, adasum):
            distributed.step = self._noting(distributed.step)

    def _noting(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def noted_step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            result = step(optimizer, *args, **kwargs)
            self.end_step(optimizer)
            return result

        return noted_step

    def _patch_state(self, module: ModuleType) -> None:
        dealer = self
        samplers, optimizers = module.SamplerStateHandler, module.OptimizerStateHandler
        sync_sampler, sync_optimizer = samplers.sync, optimizers.sync

        @functools.wraps(sync_sampler)
        def sync_and_agree(handler: Any) -> None:
            sync_sampler(handler)
            sampler = getattr(handler.value, "sampler", handler.value)
            if dealer.deals(sampler):
                dealer.agree(sampler, module.broadcast_object)

        @functools.wraps(sync_optimizer)
        def sync_between_deals(handler: Any) -> None:
            # It may make steps that train nothing.
            dealer.end()
            sync_optimizer(handler)

        samplers.sync = sync_and_agree
        optimizers.sync = sync_between_deals
        if self.settings.lr_rule is not LrRule.NONE:
            LearningRates(self.settings.lr_rule, self.settings.lr_width).follow(module)


# --------------------------------------------------------------------------------- learning rates


_schedulers: weakref.WeakSet[Any] = weakref.WeakSet()
"""Every scheduler of PyTorch's in this process."""
_following: weakref.WeakSet[Any] = weakref.WeakSet()
"""Those that were found to start from the initial rates of their optimizer."""


def _patch_schedulers(module: ModuleType) -> None:
    original = module.LRScheduler.__init__

    @functools.wraps(original)
    def __init__(scheduler: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(scheduler, *args, **kwargs)
        _schedulers.add(scheduler)

    module.LRScheduler.__init__ = __init__


class LearningRates:
    """Lets the learning rates of the optimizers in a state follow the width.

    Each parameter group carries the width that its rates belong to (``WIDTH_KEY``), so a commit that is
    restored at another width, or in another process, is put right by the next synchronisation.
    """

    def __init__(self, rule: LrRule, script_width: int | None) -> None:
        self._rule = rule
        self._script_width = script_width

    def follow(self, module: ModuleType) -> None:
        """Hook into ``horovod.torch.elastic.state``."""
        rates = self
        handlers, states = module.OptimizerStateHandler, module.TorchState
        init, sync, on_reset = handlers.__init__, handlers.sync, states.on_reset

        @functools.wraps(init)
        def stamped_init(handler: Any, optimizer: Any) -> None:
            rates._stamp(optimizer)
            init(handler, optimizer)

        @functools.wraps(sync)
        def sync_rates(handler: Any) -> None:
            optimizer = handler.value
            rates._stamp(optimizer)
            followers = rates._followers(optimizer)
            sync(handler)
            rates._put_right(optimizer, module.broadcast_object)
            for scheduler in followers:
                scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
                scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]  # noqa: SLF001

        @functools.wraps(on_reset)
        def watched_on_reset(state: Any) -> None:
            found = [
                handler.value
                for handler in state._handlers.values()  # noqa: SLF001
                if isinstance(handler, handlers)
            ]
            before = [[_number(group["lr"]) for group in optimizer.param_groups] for optimizer in found]
            on_reset(state)
            for optimizer, old in zip(found, before, strict=True):
                rates._yield_to_script(optimizer, old)

        handlers.__init__ = stamped_init
        handlers.sync = sync_rates
        states.on_reset = watched_on_reset

    def _stamp(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group.setdefault(WIDTH_KEY, self._script_width or _world_size())

    @staticmethod
    def _followers(optimizer: Any) -> list[Any]:
        """Return the schedulers that start from this optimizer's initial rates."""
        groups = optimizer.param_groups
        mine = {id(parameter) for group in groups for parameter in group["params"]}

        def follows(scheduler: Any) -> bool:
            theirs = scheduler.optimizer.param_groups
            return (
                len(theirs) == len(groups)
                and all(id(parameter) in mine for group in theirs for parameter in group["params"])
                and all("initial_lr" in group for group in groups)
                # After a restore they differ until the rates are right again.
                and (
                    scheduler in _following or scheduler.base_lrs == [group["initial_lr"] for group in groups]
                )
            )

        found = [scheduler for scheduler in _schedulers if follows(scheduler)]
        _following.update(found)
        return found

    def _put_right(self, optimizer: Any, broadcast_object: Callable[[Any], Any]) -> None:
        groups = optimizer.param_groups
        # Horovod sends the rates of optimizers without state to nobody.
        mine = [{key: group[key] for key in (*_RATES, WIDTH_KEY) if key in group} for group in groups]
        width = _world_size()
        for group, values in zip(groups, broadcast_object(mine), strict=True):
            ratio = self._rule.factor(width) / self._rule.factor(values[WIDTH_KEY])
            for key in _RATES:
                if key in values:
                    group[key] = _scaled(group.get(key), values[key], ratio)
            group[WIDTH_KEY] = width

    @staticmethod
    def _yield_to_script(optimizer: Any, old: list[float]) -> None:
        width = _world_size()
        for group, rate in zip(optimizer.param_groups, old, strict=True):
            if _number(group["lr"]) != rate and group.get(WIDTH_KEY) != width:
                group[WIDTH_KEY] = width
                _say_once(
                    "a reset callback of this script sets the learning rate, "
                    f"so {LR_RULE_VARIABLE} leaves it alone"
                )


def _world_size() -> int:
    size: int = sys.modules["horovod.torch.mpi_ops"].size()
    return size


def _number(rate: Any) -> float:
    return float(rate)


def _scaled(present: Any, value: Any, ratio: float) -> Any:
    """Return ``value`` times ``ratio``; a rate that is a tensor stays the tensor that it is."""
    if hasattr(present, "copy_"):
        return present.copy_(value * ratio)
    return value if ratio == 1.0 else value * ratio


# ------------------------------------------------------------------------------------------ hooks


_dealer: Dealer | None = None


def hooks(settings: Settings) -> Mapping[str, import_hooks.Hook]:
    """Return what makes each sample train exactly once, by module name; for one process.

    They belong behind the repairs of Horovod's state, which replace what these wrap.
    """
    global _dealer  # noqa: PLW0603 - hooks into imported modules are the process's
    _dealer = Dealer(settings)
    found = dict(_dealer.hooks())
    if settings.lr_rule is not LrRule.NONE:
        found["torch.optim.lr_scheduler"] = _patch_schedulers
    return found


def dealer(settings: Settings | None = None) -> Dealer:
    """Return this process's dealer; install one first where no worker start has done so.

    Args:
        settings: For a dealer that is made now; default: those of the environment.
    """
    if _dealer is None:
        import_hooks.install(hooks(settings or Settings.of_job(None, os.environ)))
    if _dealer is None:
        raise AssertionError
    return _dealer
