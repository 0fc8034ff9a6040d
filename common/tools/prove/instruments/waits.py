"""Records where the recipe's loop waits for the device, such as at `.item()`, by file and line.

A GPU works through a queue. Code that reads a tensor's values waits until the queue is empty, and
the GPU is idle until there is new work. On a CPU nothing waits, but the same operations occur.

Two torch modes observe them. `TorchDispatchMode` sees `.item()`, `bool(tensor)`, `print(tensor)`,
comparisons and operations whose result has a size that depends on values. `TorchFunctionMode` sees
the rest: `.tolist()`, `.numpy()`, and on a CPU `.cpu()`. A wrapper sees `synchronize()`.

An operation counts if the innermost code outside of libraries is the user's, in any folder, or
belongs to an installed package that the user's code calls. Waits in `common` do not count, because
it waits only at log lines.

It writes a `Wait` for such an operation, once for each line and update.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from common.data.loader import Loader
from common.data.samples import Batch
from common.lifecycle.evaluations import Evaluations
from common.measure.value_checks import Metrics
from common.run import Run
from common.system.installed_code import is_installed
from common.tools.prove.instruments.host_storages import HostStorages, tensors_in
from common.tools.prove.instruments.wait_frames import (
    calling_frame,
    is_in_this_library,
    users_frame,
)
from common.tools.prove.observation.session import Session
from common.tools.prove.records.instrument_records import Wait

# The arguments of any function of torch; each function has types of its own.
Positional = tuple[Any, ...]
Named = dict[str, Any]
# The call in the user's code, by the operation that the dispatcher sees.
READING = {
    "_local_scalar_dense": "reading a value, as .item(), float(), bool() or print() do",
    "is_nonzero": "bool()",
    "item": ".item()",
    "equal": "torch.equal",
    "allclose": "torch.allclose",
    "nonzero": "nonzero, whose result has a size that depends on values",
    "masked_select": "masked_select, whose result has a size that depends on values",
    "_unique2": "unique, whose result has a size that depends on values",
    "unique_dim": "unique, whose result has a size that depends on values",
    "unique_consecutive": "unique, whose result has a size that depends on values",
    "bincount": "bincount, whose result has a size that depends on values",
    "_linalg_check_errors": "a function of torch.linalg that checks its result",
}
MASKED = "indexing with a mask, whose result has a size that depends on values"
COPIED = "a copy to the host"
# Calls that only the mode of Python functions sees.
CALLS = {
    "tolist": ".tolist()",
    "numpy": ".numpy()",
    "__array__": "a conversion to NumPy",
    "__repr__": "print() or str()",
}
# Functions that read values only on a CPU, to check them. (Without `num_classes`, `one_hot` reads
# the largest label on any device; see `called_wait`.)
CHECKED_ON_CPU = {"one_hot", "multinomial", "bernoulli"}
# Functions that make a tensor on the host, unless they get a tensor or a device.
MADE_ON_HOST = {"tensor", "as_tensor", "asarray"}
# More functions that make tensors on the host. The modes do not see calls of these.
MADE_UNSEEN = ("from_numpy", "frombuffer")
# Modules with a function `synchronize`, which waits for all work of a device.
SYNCHRONIZING = (torch.cuda, torch.accelerator)


def install(session: Session) -> None:
    """Install the instrument. The probe calls this before the recipe runs."""
    observer = WaitObserver(session)
    session.wrap(Run, "batches", observer.around_batches)
    session.wrap(Run, "log", observer.around_log)
    session.wrap(Evaluations, "evaluating", observer.around_evaluating)
    for name in MADE_UNSEEN:
        session.wrap(torch, name, observer.around_from_numpy)
    for module in SYNCHRONIZING:
        session.wrap(module, "synchronize", observer.around_synchronize)


class WaitObserver:
    """Observes the loop's body, and writes the operations that wait."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.is_in_body = False  # whether the loop's body runs
        self.step = 0  # the number of updates before the current batch
        # Whether an evaluation has begun whose figures are not logged yet.
        self.is_evaluating = False
        self.reported_waits: set[tuple[int, str, int, str]] = set()  # update, file, line, operation
        self.on_host = HostStorages()
        # The call of a function of torch in progress, as `Functions` sees it:
        self.function_name = ""  # empty outside of such a call
        self.uses_device = False  # whether the call names a device or has tensors on the device

    def around_batches(
        self, original: Callable[[Run, Loader], Iterator[Batch]], run: Run, loader: Loader
    ) -> Iterator[Batch]:
        """Yield batches; between two of them, the loop's body runs under both modes."""
        for batch in original(run, loader):
            self.is_evaluating = False
            # `run.record` counts the update, but the code after it still belongs to this batch.
            self.step = self.session.step
            self.is_in_body = True
            try:
                with Operations(self), Functions(self):
                    yield batch
            finally:
                self.is_in_body = False

    @contextmanager
    def around_evaluating(
        self,
        original: Callable[..., AbstractContextManager[nn.Module]],
        evaluations: Evaluations,
        *arguments: object,
    ) -> Iterator[nn.Module]:
        """Ignore waits from the beginning of an evaluation until its figures are logged.

        An evaluation may wait: its figures have to be read.
        """
        self.is_evaluating = True
        with original(evaluations, *arguments) as bare_model:
            yield bare_model

    def around_log(
        self, original: Callable[[Run, Metrics], None], run: Run, figures: Metrics
    ) -> None:
        original(run, figures)
        self.is_evaluating = False

    def around_from_numpy(
        self, original: Callable[..., torch.Tensor], *arguments: object, **named: object
    ) -> torch.Tensor:
        """Remember that the tensor is on the host, so that reading it does not count as a wait.

        The modes do not see the calls of `MADE_UNSEEN`.
        """
        result = original(*arguments, **named)
        self.on_host.add(result)
        return result

    def around_synchronize(
        self, original: Callable[..., None], *arguments: object, **named: object
    ) -> None:
        """Write a call of `synchronize()` in the loop's body."""
        if self.is_in_body:
            self.write_wait("synchronize()")
        original(*arguments, **named)

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the host while training runs on the device.

        A run on a CPU stands in for one on an accelerator. On a CPU, only the tensors that the loop
        made from numbers of Python or NumPy count as the host's.
        """
        if self.run.device.type != "cpu":
            return tensor.device.type == "cpu"
        return tensor in self.on_host

    @property
    def run(self) -> Run:
        """The recipe's run, which exists when its loop runs."""
        assert self.session.run is not None
        return self.session.run

    def write_wait(self, operation: str) -> None:
        """Write a `Wait`, if the user's code has called the operation that waits.

        Args:
            operation: the operation in words.
        """
        if self.is_evaluating:
            return
        frame = calling_frame(sys._getframe(1), __file__)
        if frame is None or is_in_this_library(frame.f_code.co_filename):
            return
        run = self.run
        caller = users_frame(frame, Path(run.context.recipe_file).resolve())
        if caller is None:
            return
        file = frame.f_code.co_filename
        wait = (self.step, file, frame.f_lineno, operation)
        if wait in self.reported_waits:
            return
        self.reported_waits.add(wait)
        self.session.write(
            Wait(
                step=self.step,
                file=file,
                line=frame.f_lineno,
                operation=operation,
                caller_file=caller.f_code.co_filename,
                caller_line=caller.f_lineno,
                is_in_installed_package=is_installed(file),
                is_update_logged=bool(run.plan.logs(self.step + 1)),
            )
        )


class Operations(TorchDispatchMode):
    """Observes the operations that reach the dispatcher.

    It does not look into operations that call functions, such as `flex_attention` and `torch.cond`.
    """

    # Without this, torch refuses to run operations that call functions.
    supports_higher_order_operators = True

    def __init__(self, observer: WaitObserver) -> None:
        super().__init__()
        self.observer = observer

    def __torch_dispatch__(
        self,
        operation: OpOverload | HigherOrderOperator,
        types: object,
        arguments: Positional = (),
        named: Named | None = None,
    ) -> object:
        """Write an operation if it waits for the device, run it, and note where its result is."""
        named = named or {}
        inputs = [*tensors_in((arguments, named))]
        has_device_tensors = not all(self.observer.is_host(tensor) for tensor in inputs)
        if has_device_tensors and isinstance(operation, OpOverload):
            wait_in_words = self.dispatched_wait(operation, arguments, named)
            is_check = self.observer.function_name in CHECKED_ON_CPU
            if wait_in_words is not None and not is_check:
                self.observer.write_wait(wait_in_words)
        result = operation(*arguments, **named)
        if has_device_tensors:
            self.observer.on_host.remove(result)
        # What is computed from host tensors alone is on the host. So is a new tensor, unless the
        # function that the loop called names the device or has tensors on it.
        elif inputs or not self.observer.uses_device:
            self.observer.on_host.add(result)
        return result

    def dispatched_wait(
        self, operation: OpOverload, arguments: Positional, named: Named
    ) -> str | None:
        """Return an operation in words if it waits for the device, or None."""
        name = operation.overloadpacket.__name__
        if name in READING:
            return READING[name]
        if name == "repeat_interleave" and named.get("output_size") is None:
            # The overload that takes only the numbers of repeats adds them up to know the result's
            # size.
            depends_on_values = isinstance(arguments[0], torch.Tensor) and len(arguments) == 1
            return "repeat_interleave without output_size" if depends_on_values else None
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            return MASKED if selects_by_mask(name, arguments) else None
        if name in ("_to_copy", "copy_"):
            return COPIED if self.goes_to_host(name, arguments, named) else None
        return None

    def goes_to_host(self, name: str, arguments: Positional, named: Named) -> bool:
        """Whether an operation copies from a device to the host, and waits for the copy."""
        is_blocking = not named.get("non_blocking", False)
        if name == "_to_copy":
            device = named.get("device")
            target = None if device is None else torch.device(device).type
            source = arguments[0]
        else:
            target = arguments[0].device.type
            source = arguments[1]
        return is_blocking and target == "cpu" and source.device.type != "cpu"


class Functions(TorchFunctionMode):
    """Observes the functions of torch that Python code calls."""

    def __init__(self, observer: WaitObserver) -> None:
        super().__init__()
        self.observer = observer

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: object,
        arguments: Positional = (),
        named: Named | None = None,
    ) -> object:
        """Write a function if it waits for the device, run it, and note a result made on the host.

        While it runs, the observer knows its name and whether it uses the device.
        """
        named = named or {}
        observer = self.observer
        name = getattr(function, "__name__", "")
        previous_function = observer.function_name
        previous_uses_device = observer.uses_device
        inputs = [*tensors_in((arguments, named))]
        has_device_tensors = not all(observer.is_host(tensor) for tensor in inputs)
        observer.function_name = name
        observer.uses_device = has_device_tensors or named.get("device") is not None
        try:
            if has_device_tensors:
                wait_in_words = self.called_wait(name, arguments, named)
                if wait_in_words is not None:
                    observer.write_wait(wait_in_words)
            result = function(*arguments, **named)
            if name in MADE_ON_HOST and not inputs and not observer.uses_device:
                observer.on_host.add(result)
            return result
        finally:
            observer.function_name = previous_function
            observer.uses_device = previous_uses_device

    def called_wait(self, name: str, arguments: Positional, named: Named) -> str | None:
        """Return the call of a function in words if it waits for the device, or None."""
        if name in CALLS:
            return CALLS[name]
        if name == "one_hot":
            classes = named.get("num_classes", arguments[1] if len(arguments) > 1 else -1)
            return "one_hot without num_classes" if classes == -1 else None
        # On a device, the dispatcher sees the copies below.
        if self.observer.run.device.type != "cpu":
            return None
        if name == "cpu":
            return ".cpu()"
        if name == "to" and not named.get("non_blocking", False):
            targets = [*arguments[1:2], named.get("device")]
            # Here the accelerator's device object is a CPU that stands in for an accelerator. A
            # move to this very object is a move to the device. A move to any other device object
            # of the CPU is a move to the host.
            training_device = self.observer.run.accelerator.device
            for target in targets:
                is_other_device = isinstance(target, torch.device) and target is not training_device
                if target == "cpu" or (is_other_device and target.type == "cpu"):
                    return '.to("cpu")'
        return None


def selects_by_mask(name: str, arguments: Positional) -> bool:
    """Whether an indexing operation has a mask, and is not just a fill.

    Args:
        name: the name of the operation: "index", or one that assigns values.
        arguments: the tensor and the indices; if it assigns values, also these.
    """
    indices = arguments[1]
    masks = [
        index
        for index in indices
        if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
    ]
    if name == "index" or not masks:
        return bool(masks)
    # A single value at a single mask becomes a fill, which needs no positions.
    is_fill = len(indices) == 1 and arguments[2].numel() == 1
    return not is_fill
