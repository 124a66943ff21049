# SPDX-License-Identifier: Apache-2.0
"""What a training script may ask Horowatt for. An ordinary Horovod script needs none of it.

Import it before optimizers and loaders are made. It needs PyTorch and Horovod, and works without Horowatt's
launcher as well, in a script that ``horovodrun`` starts.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from horowatt.elastic import sampling
from horowatt.errors import InvalidInput

__all__ = ["ElasticLoader", "current_width", "gradient_weight", "is_padding", "num_samples_in_step"]

# Before Horovod's modules are used by the script, so that what it makes is made by the repaired ones.
_dealer = sampling.dealer()

import horovod.torch as hvd  # noqa: E402 - see above
from horovod.torch.elastic import state as _states  # noqa: E402

register_optimizer_step_post_hook(_dealer.end_plain_step)


def current_width() -> int:
    """Return the number of workers that train at present; 1 before ``hvd.init``."""
    return int(hvd.size()) if hvd.is_initialized() else 1


def is_padding() -> bool:
    """Return True when the batch handed out last is padding: a sample that another worker trains on.

    A worker gets padding where a step has fewer samples than there are workers. Its gradient weighs nothing;
    a script that adds up losses or accuracies of its own leaves it out.
    """
    deal = _dealer.latest
    return deal is not None and deal.is_padding


def num_samples_in_step() -> int | None:
    """Return the samples that all workers together got in the step of the batch handed out last.

    None when that batch did not come from an ``ElasticSampler``.
    """
    deal = _dealer.latest
    return None if deal is None or deal.handed == 0 else deal.plan.size(deal.handed - 1)


def gradient_weight() -> float:
    """Return the weight of this worker's gradients of the batch handed out last in the average over workers.

    ``hvd.DistributedOptimizer`` applies it by itself; this is for scripts that reduce gradients on their
    own. 0 for padding, 1 where all workers have as many samples.
    """
    deal = _dealer.latest
    return 1.0 if deal is None or deal.handed == 0 else deal.plan.weight(deal.handed - 1, deal.rank)


class ElasticLoader:
    """Hands out batches of a data set, each sample of an epoch once, and keeps account by itself.

    Put it into ``hvd.elastic.TorchState`` as an attribute: its place in the epoch is committed, restored and
    synchronised with the state, and a batch is recorded when an optimizer has made its step on it.

        loader = ElasticLoader(data, global_batch=256)
        state = hvd.elastic.TorchState(model, optimizer, loader=loader)

        @hvd.elastic.run
        def train(state):
            while loader.epoch < epochs:
                for inputs, labels in loader:
                    ...
                    optimizer.step()
                    state.commit()
                loader.set_epoch(loader.epoch + 1)
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        global_batch: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        """Make a loader over a data set with indices and a length that stays the same.

        Args:
            batch_size: Samples of one step of one worker. Default: what the job declares.
            global_batch: Samples of one step of all workers together, split at each width so that shares
                differ by at most one.
            seed: Of the order of samples, which must be the same on all workers.
            drop_last: Leave out the last step of an epoch when it is incomplete.
            options: Further options of ``torch.utils.data.DataLoader``.

        Raises:
            InvalidInput: ``HW-DATA-002`` for a batch that is not positive, declared twice or nowhere.
        """
        declared = _dealer.settings.batch_size
        if batch_size is None and global_batch is None and declared is not None:
            if _dealer.settings.total_batch is not None:
                global_batch = declared
            else:
                batch_size = declared
        given = [size for size in (batch_size, global_batch) if size is not None]
        if len(given) != 1 or given[0] < 1:
            raise InvalidInput(
                "HW-DATA-002",
                "the batch of an ElasticLoader cannot be used",
                because=f"batch_size is {batch_size}, global_batch is {global_batch}",
                hint="give one of the two, 1 or more, or declare the batch with the job: --batch-size N",
            )
        self.sampler = hvd.elastic.ElasticSampler(dataset, shuffle=shuffle, seed=seed)
        self.sampler._horowatt_automatic = True  # noqa: SLF001 - our own attributes
        self.sampler._horowatt_total = global_batch  # noqa: SLF001
        self._loader = DataLoader(
            dataset,
            # With a batch of all, each worker's follows from the plan.
            batch_size=batch_size or 1,
            sampler=self.sampler,
            drop_last=drop_last,
            collate_fn=collate_fn,
            num_workers=num_workers,
            **options,
        )

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the batches of what is left of the epoch."""
        return iter(self._loader)

    def __len__(self) -> int:
        """Return the steps of what was left of the epoch when it began or was last resized."""
        return len(self._loader)

    @property
    def epoch(self) -> int:
        """Number of the present epoch, from 0."""
        return int(self.sampler.epoch)

    @property
    def processed(self) -> int:
        """Samples of the present epoch that all workers together have trained on and recorded."""
        return int(self.sampler.processed_num)

    @property
    def num_samples_in_step(self) -> int:
        """Samples that all workers together got in the step of the batch handed out last; 0 before any."""
        deal = self._deal()
        return 0 if deal is None or deal.handed == 0 else deal.plan.size(deal.handed - 1)

    @property
    def is_padding(self) -> bool:
        """True when the batch handed out last is padding; see ``horowatt.training.is_padding``."""
        deal = self._deal()
        return deal is not None and deal.is_padding

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with an order of its own. Call it when one is over, on every worker."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the place in the data: epoch, and samples of it that were trained on."""
        state: dict[str, int] = self.sampler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to a place that ``state_dict`` returned, at the present width."""
        self.sampler.load_state_dict(state)

    def _deal(self) -> sampling.Deal | None:
        deal: sampling.Deal | None = self.sampler._horowatt_deal  # noqa: SLF001
        return deal


_states.get_handler_registry().append((ElasticLoader, _states.SamplerStateHandler))
