"""The Accelerator of a run, which can also shard networks and train networks that begin frozen."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau

from common.errors import UserError
from common.training.gradients.averaging import FreezableDDP, average_gradients
from common.training.precision import SIXTEEN_BIT_DTYPES

if TYPE_CHECKING:  # these imports take a second, and only runs with shards need them
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from common.training.sharding.networks import Sharder


ADVICE_ON_PLATEAUS = (
    "leave it out of accelerator.prepare and of the loop, and call scheduler.step(figures[NAME]) "
    "after run.log(figures) (see docs/make-your-own.md)"
)


class ShardingAccelerator(Accelerator):
    """An Accelerator that can shard networks over ranks, and train networks that begin frozen.

    It shards the networks that it prepares after a call of `enable_sharding`. It also averages the
    gradients of networks that were wholly frozen when they were prepared, and unfrozen later.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.sharder: Sharder | None = None  # None unless networks are sharded
        # The parameters of each network that had no trainable parameter when it was prepared. DDP
        # does not wrap such a network. A recipe may unfreeze it, so `backward` averages its
        # gradients.
        self.frozen_networks: WeakKeyDictionary[nn.Module, list[nn.Parameter]] = WeakKeyDictionary()
        # Called once, before the next backward pass; None: nothing is to be called.
        self.before_backward: Callable[[], None] | None = None
        super().__init__(*args, **kwargs)

    @property
    def mesh(self) -> "DeviceMesh | None":
        """The mesh of all ranks, if networks are sharded."""
        return None if self.sharder is None else self.sharder.mesh

    def enable_sharding(self, reduce_precision: str) -> None:
        """Make later calls of `prepare` shard their networks over all ranks.

        Nothing is sharded yet.

        Args:
            reduce_precision: the precision in which gradients are summed over ranks: "fp16",
                "bf16", or "no" for fp32.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy

        from common.training.sharding.networks import Sharder

        precision = MixedPrecisionPolicy(
            param_dtype=SIXTEEN_BIT_DTYPES.get(self.mixed_precision),
            reduce_dtype=SIXTEEN_BIT_DTYPES.get(reduce_precision, torch.float32),
            cast_forward_inputs=False,  # autocast casts inputs, with or without shards
        )
        mesh = init_device_mesh(self.device.type, (self.num_processes,))
        self.sharder = Sharder(mesh, self.device, precision)

    def prepare(self, *args: object, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects as Accelerate does, and give optimizers the sharded parameters.

        Optimizers were made earlier, with the parameters that sharding replaces.

        Returns:
            What Accelerate returns: the one object, or a tuple of several.
        """
        prepared = super().prepare(*args, device_placement=device_placement)
        if self.sharder is not None:
            for wrapper in self._optimizers:
                self.sharder.give_shards_to(wrapper.optimizer)
        return prepared

    def gather_for_metrics(self, *args: Any, **kwargs: Any) -> Any:
        """Gather as Accelerate does on one process, and refuse to do so on several.

        Accelerate's own loaders give all ranks batches of one size, and tell this method which
        samples only pad the last batch. A run's loaders do neither, so ranks would wait for each
        other, or a metric would be wrong.

        Raises:
            UserError: there are several processes.
        """
        if self.num_processes > 1:
            raise UserError(
                "accelerator.gather_for_metrics can't be used with several processes, because a "
                "recipe's loaders give them different numbers and sizes of batches",
                advice=(
                    "pass means or totals to Sums, or get all samples with sums.collect(...) (see "
                    "docs/metrics.md)"
                ),
            )
        return super().gather_for_metrics(*args, **kwargs)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a network, and shard it if this Accelerator shards."""
        if self.sharder is None:
            return self.prepare_whole(model, device_placement, evaluation_mode)
        # Accelerate must not move the whole model, which may be larger than the device. In
        # evaluation mode, it does not wrap the model in DDP.
        model = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        self.sharder.distribute(model)
        return model

    def prepare_whole(
        self, model: nn.Module, device_placement: bool | None, evaluation_mode: bool
    ) -> nn.Module:
        """Prepare a network of which each rank has a whole copy, so that gradients are averaged."""
        is_frozen = not any(parameter.requires_grad for parameter in model.parameters())
        # DDP refuses a network without a trainable parameter, but on a CPU Accelerate 1.15 would
        # wrap such a network all the same. In evaluation mode, Accelerate wraps nothing.
        prepared = super().prepare_model(model, device_placement, evaluation_mode or is_frozen)
        if isinstance(prepared, DistributedDataParallel):
            FreezableDDP.adopt(prepared, self.ddp_handler)  # changes its class in place
        elif self.num_processes > 1 and not evaluation_mode:
            # Accelerate left the network without DDP because it is frozen. `backward` averages its
            # gradients once it is unfrozen.
            self.frozen_networks[prepared] = [*prepared.parameters()]
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare a scheduler that makes a step for each update.

        Raises:
            UserError: the scheduler needs a metric in each step. Accelerate would repeat such a
                step for each process, and leave it out between the micro-batches of an update.
        """
        if isinstance(scheduler, ReduceLROnPlateau):
            raise UserError(
                "accelerator.prepare got a ReduceLROnPlateau, which makes a step for each "
                "evaluation and not for each update",
                advice=ADVICE_ON_PLATEAUS,
            )
        return super().prepare_scheduler(scheduler)

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        """Compute gradients, and average those of `frozen_networks`, which DDP leaves out."""
        if self.before_backward is not None:
            self.before_backward()
            self.before_backward = None
        super().backward(loss, **kwargs)
        if self.sync_gradients:
            for parameters in self.frozen_networks.values():
                average_gradients(parameters)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Return a context in which gradients add up on each rank alone.

        The last micro-batch of an update runs outside of it, and averages the sums over ranks.
        """
        if self.sharder is not None:
            cast("FSDPModule", model).set_requires_gradient_sync(False)
        with super().no_sync(model):  # this does nothing for sharded networks
            yield
        if self.sharder is not None:
            cast("FSDPModule", model).set_requires_gradient_sync(True)

    def structure_of(self, model: nn.Module) -> nn.Module:
        """Return a network whose shapes and counts may be read, but not its values.

        For a sharded network, this is the copy on the meta device, and otherwise `model` itself.
        One that only holds a sharded network, as an `AveragedModel` does, is not sharded itself.
        """
        return model if self.sharder is None else self.sharder.skeletons.get(model, model)
