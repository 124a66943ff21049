# SPDX-License-Identifier: Apache-2.0
"""Counting the optimizer steps and samples of a PyTorch script that knows nothing of it.

Steps are counted by PyTorch's global hooks around ``Optimizer.step``; Horovod's
``DistributedOptimizer`` runs one step inside another, and only one of them counts. Samples are
counted where a ``DataLoader`` hands out a batch, and are credited to the step that follows: to the
iterator that handed out the latest batch, if it is still in use. So a finished evaluation does not
count, gradient accumulation counts in full, and a prefetched batch counts once.

Known limitations: optimizers that do not derive from ``torch.optim.Optimizer`` are not seen; one that
drives several others in its step counts once for each; an
evaluation loop without ``torch.no_grad`` that is still open when a step is made counts as training;
a loader with ``batch_size=None`` counts as unknown, because its items may be samples or batches.
"""

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from horowatt.elastic.counters import CountersWriter
from horowatt.elastic.import_hooks import Hook

_SEARCH_DEPTH = 4
"""How deep a batch is searched for something with a leading dimension."""


@dataclass(frozen=True, slots=True)
class DeclaredBatch:
    """The batch size that a job declares, for scripts whose samples cannot be counted.

    Attributes:
        samples: Per worker, or of all workers together.
        total: True when ``samples`` is of all workers together.
    """

    samples: int
    total: bool

    def of_worker(self, rank: int, world_size: int) -> int:
        """Return the samples of one step of worker ``rank``; those of all workers add up."""
        if not self.total:
            return self.samples
        share, rest = divmod(self.samples, world_size)
        return share + (1 if rank < rest else 0)


class _Feed:
    """What one iterator of a DataLoader handed out since the last step that used it.

    Where the sizes of all its batches follow from the sampler, batches are only counted (``handed``);
    elsewhere each is looked at (``inspected``).
    """

    __slots__ = (
        "batches",
        "credited",
        "exhausted",
        "handed",
        "inspected",
        "iterator",
        "limit",
        "missing",
        "nominal",
        "regular",
        "total",
        "used",
    )

    def __init__(self, iterator: Any, first_batch: Any) -> None:
        self.iterator = weakref.ref(iterator)
        self.nominal, self.limit = batch_sizes(iterator)
        self.total, self.missing = regular_epoch(iterator)
        # A collate function may make something else of a regular batch, and the first one shows it.
        self.regular = self.total > 0 and leading_dimension(first_batch) == min(
            self.nominal or 0, self.total * (self.nominal or 0) - self.missing
        )
        self.restart(iterator)
        self.batches = 0
        self.inspected = 0
        self.credited = False

    def restart(self, iterator: Any) -> None:
        """Note that the iterator begins an epoch, the first one or another."""
        self.handed = 0
        self.used = 0
        self.exhausted = False
        deal = getattr(getattr(iterator, "_sampler_iter", None), "horowatt_deal", None)
        if deal is not None and getattr(iterator, "_auto_collation", False):
            # Dealt by Horowatt: the sizes are known, differ from epoch to epoch, and padding is none of them.
            self.nominal, self.total, self.missing = deal.regular()
            self.regular = True

    def look_at(self, batch: Any) -> None:
        """Note a batch whose size does not follow from the sampler."""
        size = leading_dimension(batch)
        if size is None or size > self.limit:
            size = self.nominal
        if size is not None:
            self.inspected += size

    def pending(self) -> bool:
        return self.handed > self.used or self.inspected > 0

    def take(self) -> int:
        """Return the samples that no step has used yet, and note that one does."""
        samples = self.inspected
        if self.handed > self.used:
            samples += (self.handed - self.used) * (self.nominal or 0)
            if self.handed == self.total:
                samples -= self.missing
            self.used = self.handed
        self.inspected = 0
        return samples

    def drop(self) -> None:
        self.used = self.handed
        self.inspected = 0

    def in_use(self) -> bool:
        return not self.exhausted and self.iterator() is not None

    def is_training(self) -> bool:
        """Return True when a closed iterator is still believed to have fed the training."""
        return self.credited or (self.batches == 1 and not self.exhausted)


class StepMeter:
    """Counts for one worker. ``hooks`` connects it to PyTorch once the script imports that."""

    def __init__(
        self,
        counters: CountersWriter,
        declared: DeclaredBatch | None = None,
        after_step: Callable[[Any, int | None], None] | None = None,
        on_resumed: Callable[[float | None, float], None] | None = None,
    ) -> None:
        """Make a meter that counts into ``counters``.

        Args:
            after_step: Called with the optimizer and the samples of the step, before its end is noted.
            on_resumed: Called after the first step in a world, with the end of the last step before
                that world (None if there was none) and the end of this one, Unix seconds.
        """
        self._counters = counters
        self._declared = declared
        self._after_step = after_step
        self._on_resumed = on_resumed
        self._stepping: Any = None
        self._last: _Feed | None = None
        self._regular: _Feed | None = None
        self._feeds: list[_Feed] = []
        self._others = False
        self._loader_seen = False
        self._paused = 0
        self._first_in_world = True
        self._grad_enabled: Callable[[], bool] = lambda: True

    def hooks(self) -> Mapping[str, Hook]:
        """Return what to do to modules of PyTorch, by module name."""
        return {
            "torch.optim.optimizer": self._instrument_optimizers,
            "torch.utils.data.dataloader": self._instrument_loaders,
        }

    def enter_world(self, rank: int, world_size: int) -> None:
        """Note that ``hvd.init`` returned; the next step is the first of a new world."""
        self._counters.enter_world(rank, world_size, time.time())
        self._stepping = None
        self._first_in_world = True

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Within this, optimizer steps are not training steps."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    # ----------------------------------------------------------------------------------- steps

    def _instrument_optimizers(self, module: ModuleType) -> None:
        module.register_optimizer_step_pre_hook(self.before_step)
        module.register_optimizer_step_post_hook(self.end_step)

    def before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Note that a step begins. One that raises never gets to ``end_step``, and does no harm."""
        self._stepping = optimizer

    def end_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Count the step, unless the step inside it was counted just before."""
        if self._stepping is not optimizer:
            return
        self._stepping = None
        if self._paused:
            return
        feed = self._last
        if feed is not None and feed.credited and not feed.exhausted and not self._others:
            # The usual case, kept short: this runs once per step, each time with cold caches.
            samples: int | None = feed.take()
        else:
            samples = self._samples_of_step()
        if self._after_step is not None:
            self._after_step(optimizer, samples)
        counters = self._counters
        if self._first_in_world:
            self._end_first_step(samples)
        else:
            counters.step(time.time(), samples)

    def _end_first_step(self, samples: int | None) -> None:
        counters = self._counters
        before_s = counters.last_step_end_s if counters.steps else None
        now_s = time.time()
        counters.step(now_s, samples)
        self._first_in_world = False
        if self._on_resumed is not None:
            self._on_resumed(before_s, now_s)

    def _samples_of_step(self) -> int | None:
        feed = self._last
        if feed is None or not feed.in_use():
            feed = self._best_feed()
        if feed is None:
            if self._loader_seen:
                return 0
            declared, counters = self._declared, self._counters
            if declared is None:
                return None
            return declared.of_worker(max(counters.rank, 0), max(counters.world_size, 1))
        samples = feed.take()
        if not feed.credited:
            feed.credited = True
            self._note_training_feed(feed)
        if self._others:
            self._drop_others(feed)
        return samples

    def _best_feed(self) -> _Feed | None:
        candidates = [feed for feed in reversed(self._feeds) if feed.pending()]
        used = [feed for feed in candidates if feed.in_use()]
        closed = [feed for feed in candidates if feed.is_training()]
        return next(iter(used or closed), None)

    def _drop_others(self, feed: _Feed) -> None:
        for other in self._feeds:
            if other is not feed:
                other.drop()
        self._feeds = [other for other in self._feeds if other is feed]
        self._others = False

    def _note_training_feed(self, feed: _Feed) -> None:
        self._loader_seen = True
        length = _length_of_dataset(feed.iterator())
        if length is not None:
            self._counters.epoch_samples = length

    # --------------------------------------------------------------------------------- loaders

    def _instrument_loaders(self, module: ModuleType) -> None:
        base = module._BaseDataLoaderIter  # noqa: SLF001 - the one class that all iterators share
        original, original_reset = base.__next__, base._reset  # noqa: SLF001
        base._horowatt_feed = None  # noqa: SLF001
        meter = self
        torch = sys.modules["torch"]
        self._grad_enabled = torch.is_grad_enabled
        # A forked child that reads data of its own has the parent's counters mapped as well.
        os.register_at_fork(after_in_child=self._stop_counting)

        def __next__(iterator: Any) -> Any:  # noqa: N807
            try:
                batch = original(iterator)
            except StopIteration:
                meter.exhausted(iterator)
                raise
            feed: _Feed | None = iterator._horowatt_feed  # noqa: SLF001
            if feed is not None and feed is meter._regular:
                feed.handed += 1
            else:
                meter.handed_out(iterator, batch)
            return batch

        def _reset(iterator: Any, *args: Any, **kwargs: Any) -> None:
            # With persistent loading processes, and the last epoch may have been left before its end.
            meter.exhausted(iterator)
            original_reset(iterator, *args, **kwargs)

        base.__next__ = __next__
        base._reset = _reset  # noqa: SLF001

    def _stop_counting(self) -> None:
        self._paused += 1
        self._regular = None
        self._grad_enabled = lambda: False

    def handed_out(self, iterator: Any, batch: Any) -> None:
        """Note that an iterator handed out a batch, if it is not the one that did so last."""
        self._regular = None
        if not self._grad_enabled():
            return
        feed: _Feed | None = iterator._horowatt_feed  # noqa: SLF001
        if feed is None:
            feed = iterator._horowatt_feed = _Feed(iterator, batch)  # noqa: SLF001
        elif feed.exhausted:
            feed.restart(iterator)
        if feed not in self._feeds:
            self._feeds.append(feed)
        self._others = len(self._feeds) > 1
        feed.batches += 1
        if feed.regular:
            feed.handed += 1
            self._regular = feed
        else:
            feed.look_at(batch)
        if feed.pending():
            self._last = feed

    def exhausted(self, iterator: Any) -> None:
        """Note that an iterator has no more batches."""
        feed: _Feed | None = iterator._horowatt_feed  # noqa: SLF001
        if feed is not None:
            feed.exhausted = True
            self._regular = None


def batch_sizes(iterator: Any) -> tuple[int | None, int]:
    """Return two sizes of the batches of a DataLoader iterator.

    The first is what a batch without a leading dimension counts for, or None if that is unknown. The
    second is the largest leading dimension that is believed: a larger one is not that of the samples.
    """
    if not getattr(iterator, "_auto_collation", False):
        return None, 0
    size = getattr(getattr(iterator, "_index_sampler", None), "batch_size", None)
    return (size, size) if isinstance(size, int) and size > 0 else (None, sys.maxsize)


def regular_epoch(iterator: Any) -> tuple[int, int]:
    """Return how many batches the iterator hands out, and how many samples the last one lacks.

    Only for PyTorch's own way of making batches of a data set with indices; (0, 0) for any other.
    """
    samplers = sys.modules["torch.utils.data.sampler"]
    batches: Any = getattr(iterator, "_index_sampler", None)
    if type(batches) is not samplers.BatchSampler or getattr(iterator, "_dataset_kind", None) != 0:
        return 0, 0
    try:
        total = len(batches)
        samples = len(batches.sampler)
    except Exception:  # noqa: BLE001 - samplers are the user's code, and many have no length
        return 0, 0
    return total, 0 if batches.drop_last else total * batches.batch_size - samples


def leading_dimension(batch: Any, depth: int = _SEARCH_DEPTH) -> int | None:
    """Return the number of samples in a batch: the first dimension of the first thing that has one."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    if depth == 0:
        return None
    if isinstance(batch, (list, tuple)):
        if batch and isinstance(batch[0], str | bytes | int | float):
            return len(batch)
        return _first_known(batch, depth)
    if isinstance(batch, Mapping):
        return _first_known(batch.values(), depth)
    return None


def _first_known(parts: Iterable[Any], depth: int) -> int | None:
    for part in parts:
        size = leading_dimension(part, depth - 1)
        if size is not None:
            return size
    return None


def _length_of_dataset(iterator: Any) -> int | None:
    try:
        return len(iterator._dataset)  # noqa: SLF001 - PyTorch's own name for it, for many years
    except Exception:  # noqa: BLE001 - data sets are the user's code, and many have no length
        return None
