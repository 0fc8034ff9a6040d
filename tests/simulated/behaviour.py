"""Checks of the simulated device, which `test_device.py` runs in a process that has it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from common.system import devices
from tests.simulated.streams import JUNK, Event, RaceError, Stream, current_stream

DEVICE = torch.device("simulated:0")


def raises(error_class: type[Exception], action: Callable[[], object]) -> bool:
    """Whether an action raises an exception of this class."""
    try:
        action()
    except error_class:
        return True
    return False


def torch_finds_the_device() -> None:
    """torch and `common` take the simulated device as the default accelerator."""
    assert torch.accelerator.is_available()
    assert devices.default_device() == DEVICE
    assert torch.ones(2, device=DEVICE).device == DEVICE


def device_has_memory_of_its_own() -> None:
    """A copy on the device does not share memory with the host; views of it share its own."""
    on_host = torch.arange(6.0)
    copy = on_host.to(DEVICE)
    on_host.zero_()
    assert copy.sum().item() == 15
    rows = copy.view(2, 3)
    rows[1].mul_(10)
    assert copy.cpu().tolist() == [0, 1, 2, 30, 40, 50]
    assert rows.t().is_contiguous() is False
    assert raises(RuntimeError, lambda: copy + torch.ones(6))


def device_has_no_float64() -> None:
    """Each way to make a float64 tensor on the device is a `TypeError`."""
    assert raises(TypeError, lambda: torch.zeros(1, dtype=torch.float64, device=DEVICE))
    assert raises(TypeError, lambda: torch.zeros(1, dtype=torch.float64).to(DEVICE))
    assert raises(TypeError, lambda: torch.ones(1, device=DEVICE).double())
    assert raises(TypeError, lambda: torch.ones(1, device=DEVICE).sum(dtype=torch.float64))
    assert not devices.has_float64(DEVICE)


def fused_optimizers_ignore_scaling() -> None:
    """A fused optimizer makes its update although `found_inf` is set."""
    parameter = nn.Parameter(torch.ones(1, device=DEVICE))
    optimizer = torch.optim.SGD([parameter], lr=0.5, fused=True)
    parameter.grad = torch.ones_like(parameter)
    optimizer.found_inf = torch.ones((), device=DEVICE)  # type: ignore[attr-defined]
    optimizer.step()
    assert parameter.item() == 0.5
    assert not devices.honours_scaling(optimizer, DEVICE)


def downloads_arrive_late() -> None:
    """A copy to the host without a wait holds junk until its stream is synchronized."""
    values = torch.full((3,), 5.0, device=DEVICE)
    arriving = values.to("cpu", non_blocking=True)
    values.zero_()
    assert bytes(arriving.view(torch.uint8).numpy()) == bytes([JUNK]) * 12
    current_stream().synchronize()
    assert arriving.tolist() == [5, 5, 5]


def uploads_read_late() -> None:
    """It is an error to change or free the source of a copy to the device before a wait."""
    source = torch.ones(3)
    target = source.to(DEVICE, non_blocking=True)
    source.fill_(2)
    assert (target + 0).to("cpu", non_blocking=True) is not None
    source.fill_(3)
    assert raises(RaceError, torch.accelerator.synchronize)
    torch.ones(3).to(DEVICE, non_blocking=True)  # freed at once
    assert raises(RaceError, torch.accelerator.synchronize)
    left_alone = torch.ones(3)
    target = left_alone.to(DEVICE, non_blocking=True)
    torch.accelerator.synchronize()
    assert target.sum().item() == 3


def streams_are_separate() -> None:
    """A stream sees the copies of another only after it has waited for that stream."""
    assert devices.has_streams(DEVICE)
    source = torch.ones(3)
    copying = Stream()
    with copying:
        target = source.to(DEVICE, non_blocking=True)
    assert target.sum().item() != 3  # the stream has not waited yet
    current_stream().wait_stream(copying)
    assert target.sum().item() == 3
    event = Event()
    with copying:
        values = target.to("cpu", non_blocking=True)
        event.record()
    assert not event.query()
    event.synchronize()
    assert values.tolist() == [1, 1, 1]
    torch.accelerator.synchronize()


def device_has_random_numbers_of_its_own() -> None:
    """The device's random numbers leave the host's generator alone and can be restored."""
    torch.manual_seed(1)
    of_host = torch.get_rng_state()
    state = devices.generator_state(DEVICE)
    assert state is not None
    first = torch.rand(4, device=DEVICE).cpu()
    assert torch.get_rng_state().equal(of_host)
    assert not torch.rand(4, device=DEVICE).cpu().equal(first)
    devices.set_generator_state(DEVICE, state)
    assert torch.rand(4, device=DEVICE).cpu().equal(first)


def autocast_works() -> None:
    """Autocast runs products in fp16 and normalisations and losses in fp32."""
    matrix = torch.ones(4, 4, device=DEVICE)
    with torch.autocast("simulated", torch.float16):
        product = F.linear(matrix, matrix)
        assert product.dtype == torch.float16
        assert F.layer_norm(product, (4,)).dtype == torch.float32
        assert F.cross_entropy(product, torch.zeros(4, 4, device=DEVICE)).dtype == torch.float32
    assert (matrix @ matrix).dtype == torch.float32


def gradients_are_the_hosts() -> None:
    """Networks have the same gradients on the device as on the host."""
    for build in (dense, convolutional):
        torch.manual_seed(0)
        model = build()
        images = torch.randn(4, 2, 6, 6)
        loss = model(images).square().mean()
        expected = torch.autograd.grad(loss, [*model.parameters()])
        model.to(DEVICE)
        model(images.to(DEVICE)).square().mean().backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad.cpu(), gradient)


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 5), nn.LayerNorm(5), nn.GELU())


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2))


if __name__ == "__main__":
    for check in (
        torch_finds_the_device,
        device_has_memory_of_its_own,
        device_has_no_float64,
        fused_optimizers_ignore_scaling,
        downloads_arrive_late,
        uploads_read_late,
        streams_are_separate,
        device_has_random_numbers_of_its_own,
        autocast_works,
        gradients_are_the_hosts,
    ):
        check()
        print(check.__name__)
