"""Gradient guard: each network is clipped by its own norm, and no non-finite update is applied."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from common.errors import TrainingError, UserError
from common.training.gradients.guard import MAX_SKIPS_IN_A_ROW, GradientGuard
from common.training.gradients.loss_scale import SharedScaler


def alone(**others: Any) -> Any:
    """Return a stand-in for an Accelerator of one process on a CPU."""
    return SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        reduce=lambda tensor, _: tensor,
        unscale_gradients=lambda _: None,
        _optimizers=[],
        **{"mixed_precision": "no", "scaler": None, **others},
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_update_with_a_non_finite_gradient_is_not_applied(value: float) -> None:
    """The weights stay as they were, and the run stops."""
    parameter = torch.nn.Parameter(torch.ones(4))
    model = torch.nn.Module()
    model.weight = parameter
    optimizer = SimpleNamespace(optimizer=torch.optim.AdamW([parameter], lr=0.1, fused=True))
    guard = GradientGuard(alone(), max_grad_norm=1.0, by_layer=False)
    parameter.grad = torch.ones(4)
    guard.clip(model, optimizer)  # type: ignore[arg-type]
    optimizer.optimizer.step()
    kept = parameter.detach().clone()
    assert not torch.equal(kept, torch.ones(4))
    guard.check(1, 0.5)
    assert guard.skipped_updates.total == 0
    parameter.grad = torch.tensor([1.0, value, 1.0, 1.0])
    guard.clip(model, optimizer)  # type: ignore[arg-type]
    optimizer.optimizer.step()
    assert torch.equal(parameter.detach(), kept)
    with pytest.raises(TrainingError) as error:
        guard.check(2, 0.5)
    assert "update 2" in error.value.message
    assert "start a new run with a lower --learning-rate" in error.value.message


@pytest.mark.parametrize(
    ("precision", "norm", "flags"),
    [
        ("no", 1.0, "--learning-rate or --max-grad-norm; also"),
        ("bf16", 1.0, "--learning-rate or --max-grad-norm, or with --mixed-precision no; also"),
        ("no", 0.0, "--learning-rate, or with --max-grad-norm 1; also"),
    ],
)
def test_advice_on_non_finite_gradients_changes_the_run(
    precision: str, norm: float, flags: str
) -> None:
    """A norm of 0 can't be lowered, and float32 is the highest precision."""
    guard = GradientGuard(alone(mixed_precision=precision), max_grad_norm=norm, by_layer=False)
    with pytest.raises(TrainingError) as error:
        guard.check(2, float("nan"))
    assert guard.figures() == {}, "without clipping, the norm is not known"
    assert error.value.problem == "the loss became NaN in update 2 or shortly before"
    assert "--max-grad-norm" not in error.value.advice, "without clipping, it has no effect"
    assert "call run.clip_grad_norm_(model, optimizer) before each step" in error.value.advice
    network = torch.nn.Linear(1, 1)
    guard.clip(network, torch.optim.SGD(network.parameters()))
    assert guard.figures() == {"train/grad_norm": 0.0, "train/skipped_updates": 0}
    with pytest.raises(TrainingError) as error:
        guard.check(2, float("nan"))
    assert f"start a new run with a lower {flags} look for damaged samples" in error.value.advice


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("checked_at", [1, 50])
@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_loss_that_is_not_finite_before_any_step_is_blamed_on_the_data(
    value: float, checked_at: int, clips: bool, precision: str
) -> None:
    """No learning rate can be the cause, however late the loss is looked at."""
    guard = GradientGuard(alone(mixed_precision=precision), max_grad_norm=1.0, by_layer=False)
    guard.note_first_loss(torch.tensor(1.0))  # of another micro-batch
    guard.note_first_loss(torch.tensor(value))
    if clips:
        network = torch.nn.Linear(1, 1)
        network.weight.grad = torch.full((1, 1), value)
        guard.clip(network, torch.optim.SGD(network.parameters()))
    with pytest.raises(TrainingError) as error:
        guard.check(checked_at, float("nan"))
    assert error.value.problem.startswith("the loss of update 1 is NaN or infinite, before any")
    assert error.value.advice.startswith("look at the data first")
    assert "--learning-rate" not in error.value.message
    assert ("--mixed-precision no" in error.value.advice) == (precision == "bf16")


def test_gradient_that_is_not_finite_before_any_step_is_blamed_on_data_and_model() -> None:
    guard = GradientGuard(alone(), max_grad_norm=1.0, by_layer=False)
    guard.note_first_loss(1.0)
    network = torch.nn.Linear(1, 1)
    network.weight.grad = torch.full((1, 1), float("inf"))
    guard.clip(network, torch.optim.SGD(network.parameters()))
    with pytest.raises(TrainingError) as error:
        guard.check(1, 1.0)
    assert error.value.problem.startswith("a gradient of update 1 is NaN or infinite")


def test_bad_first_loss_of_another_rank_is_named_on_each_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The averaged gradients are not finite on any rank, whichever rank had the loss."""
    monkeypatch.setattr(
        "common.training.gradients.guard.gather_from_ranks", lambda _, is_bad: [is_bad, True]
    )
    guard = GradientGuard(alone(), max_grad_norm=1.0, by_layer=False)
    guard.note_first_loss(1.0)
    network = torch.nn.Linear(1, 1)
    network.weight.grad = torch.full((1, 1), float("nan"))
    guard.clip(network, torch.optim.SGD(network.parameters()))
    with pytest.raises(TrainingError) as error:
        guard.check(1, 1.0)
    assert error.value.problem.startswith("the loss of update 1 is NaN or infinite")


@pytest.mark.parametrize("norm", [0.0, 0.5, 100.0])
def test_gradients_are_clipped_to_the_norm(norm: float) -> None:
    """A maximum of 0 turns clipping off. The logged norm is that before clipping."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    model = torch.nn.Module()
    model.weight = parameter
    optimizer = SimpleNamespace(optimizer=torch.optim.SGD([parameter], lr=1.0, fused=True))
    guard = GradientGuard(alone(), max_grad_norm=norm, by_layer=False)
    parameter.grad = torch.full((4,), 2.0)
    guard.clip(model, optimizer)  # type: ignore[arg-type]
    optimizer.optimizer.step()
    expected = 4.0 if norm == 0 else min(4.0, norm)
    assert float(parameter.detach().norm()) == pytest.approx(expected, rel=1e-4)
    assert float(guard.logged_norms.grad_norm) == pytest.approx(4.0)


def test_each_network_is_clipped_by_its_own_norm() -> None:
    """The first network's gradients neither count in the second's norm nor scale them."""
    networks = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    guard = GradientGuard(alone(), max_grad_norm=1.0, by_layer=False)
    for network, gradient in zip(networks, (10.0, 0.5), strict=True):
        optimizer = torch.optim.SGD(
            network.parameters(), lr=1.0
        )  # not fused, so that the guard scales gradients itself
        before = network.weight.detach().clone()
        network.weight.grad = torch.full((1, 1), gradient)
        guard.clip(network, optimizer)
        optimizer.step()
        moved = float((before - network.weight.detach()).abs())
        assert moved == pytest.approx(min(gradient, 1.0), rel=1e-4)
    assert float(guard.logged_norms.grad_norm) == 10.0, (
        "the one that is logged is the first network's"
    )


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_are_clipped_after_they_are_unscaled(fused: bool) -> None:
    """With a loss scaler, the norm is that of the true gradients."""
    weight = torch.nn.Parameter(torch.zeros(4))
    model = torch.nn.Module()
    model.weight = weight
    optimizer = SimpleNamespace(optimizer=torch.optim.SGD([weight], lr=1.0, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    accelerator = alone()
    accelerator.scaler = scaler
    accelerator.unscale_gradients = scaler.unscale_
    guard = GradientGuard(accelerator, max_grad_norm=10.0, by_layer=False)
    scaler.scale((weight * 3.0).sum()).backward()  # a gradient of 3 each: a norm of 6
    guard.clip(model, optimizer)  # type: ignore[arg-type]
    scaler.step(optimizer.optimizer)
    scaler.update()
    assert float(guard.logged_norms.grad_norm) == pytest.approx(6.0)
    assert weight.detach().tolist() == pytest.approx([-3.0] * 4)


def test_clipping_before_any_backward_pass_is_named_in_fp16() -> None:
    """Torch would fail with an assertion about its own scale."""
    scaler = SharedScaler("cpu", init_scale=1024.0)
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)  # of loss.backward()
    with pytest.raises(UserError, match=r"call accelerator.backward\(loss\) first"):
        scaler.unscale_(torch.optim.SGD([weight], lr=1.0))


def test_two_optimizers_share_a_loss_scale() -> None:
    """Both are clipped before both step. Each is unscaled once, and the scale changes once."""
    Accelerator(cpu=True)  # its optimizers need Accelerate's global state
    scaler = SharedScaler("cpu", init_scale=1024.0, growth_interval=1)
    accelerator = alone()
    accelerator.scaler = scaler
    accelerator.unscale_gradients = scaler.unscale_
    guard = GradientGuard(accelerator, max_grad_norm=0.0, by_layer=False)
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    models = [torch.nn.Module() for _ in weights]
    optimizers = []
    for model, weight in zip(models, weights, strict=True):
        model.weight = weight
        optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
        optimizers.append(AcceleratedOptimizer(optimizer, scaler=scaler))
    for update in (1, 2):
        loss: Any = sum(weight.sum() for weight in weights)
        scaler.scale(loss).backward()
        for model, optimizer in zip(models, optimizers, strict=True):
            guard.clip(model, optimizer)
        for weight, optimizer in zip(weights, optimizers, strict=True):
            optimizer.step()
            assert weight.tolist() == [-update, -update]
            optimizer.zero_grad()
        assert scaler.get_scale() == 1024.0 * 2**update  # it doubles without an overflow


@pytest.fixture(params=["fused", "not fused", "first fused", "second fused"])
def two_optimizers(request: pytest.FixtureRequest) -> Any:
    """Return a function that builds a network with two weights, each with its own optimizer."""
    fused = {
        "fused": (True, True),
        "not fused": (False, False),
        "first fused": (True, False),
        "second fused": (False, True),
    }[request.param]

    def build(scale: float | None, **options: Any) -> Any:
        model = torch.nn.Module()
        model.first, model.second = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
        optimizers = [
            torch.optim.SGD([weight], lr=1.0, fused=is_fused)
            for weight, is_fused in zip(model.parameters(), fused, strict=True)
        ]
        accelerator = alone(unwrap_model=lambda wrapped: wrapped)
        accelerator._optimizers = optimizers
        if scale is not None:
            accelerator.scaler = SharedScaler("cpu", init_scale=scale, growth_interval=1)
            accelerator.unscale_gradients = accelerator.scaler.unscale_
        guard = GradientGuard(accelerator, **{"max_grad_norm": 1.0, "by_layer": True, **options})
        return SimpleNamespace(
            model=model, optimizers=optimizers, guard=guard, scaler=accelerator.scaler
        )

    return build


def backward(setup: Any, first: float, second: float) -> None:
    """Give the two weights gradients of the true sizes, times the loss scale."""
    loss = first * setup.model.first.sum() + second * setup.model.second.sum()
    (loss if setup.scaler is None else setup.scaler.scale(loss)).backward()


def step(setup: Any, *numbers: int) -> None:
    """Make the steps of some of the optimizers, and end the update."""
    for number in numbers:
        optimizer = setup.optimizers[number]
        if setup.scaler is None:
            optimizer.step()
        else:
            setup.scaler.step(optimizer)
            setup.scaler.update()
        optimizer.zero_grad()
    setup.guard.end_update()


@pytest.mark.parametrize("calls", [(0,), (1,), (0, 1), (1, 0), (0, 0)])
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_one_call_clips_a_network_with_two_optimizers(
    two_optimizers: Any, calls: tuple[int, ...], scale: float | None
) -> None:
    """Whichever optimizer a call names, and how often, the norm is that of all true gradients."""
    setup = two_optimizers(scale)
    expected = torch.zeros(2)
    for gradients in ((3.0, 4.0), (0.03, 0.04)):
        backward(setup, *gradients)
        for number in calls:
            setup.guard.clip(setup.model, setup.optimizers[number])
        norm = math.hypot(*gradients) * 2  # each weight has four elements
        figures = setup.guard.figures()
        assert figures["train/grad_norm"] == pytest.approx(norm), "before clipping"
        assert figures["gradients/"] == pytest.approx(norm)
        step(setup, 0, 1)
        expected -= torch.tensor(gradients) / max(1.0, norm)
        moved = torch.stack([setup.model.first.detach()[0], setup.model.second.detach()[0]])
        torch.testing.assert_close(moved, expected)
    if scale is not None:
        assert setup.scaler.get_scale() == scale * 4, "it doubles after each update"


@pytest.mark.parametrize("calls", [(0,), (1,), (0, 1), (1, 0)])
@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("scale", [None, 1024.0])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_all_optimizers_of_a_network_skip_a_non_finite_update(
    two_optimizers: Any,
    calls: tuple[int, ...],
    broken: int,
    scale: float | None,
    max_grad_norm: float,
) -> None:
    """The next update is applied, and the skipped one counts once."""
    setup = two_optimizers(scale, max_grad_norm=max_grad_norm)
    gradients = [0.25, 0.25]
    gradients[broken] = float("inf")
    backward(setup, *gradients)
    for number in calls:
        setup.guard.clip(setup.model, setup.optimizers[number])
    step(setup, 0, 1)
    assert not setup.model.first.any()
    assert not setup.model.second.any()
    backward(setup, 0.25, 0.25)
    for number in calls:
        setup.guard.clip(setup.model, setup.optimizers[number])
    step(setup, 0, 1)
    for weight in setup.model.parameters():
        torch.testing.assert_close(weight.detach(), torch.full((4,), -0.25))
    setup.guard.skipped_updates.count()
    assert setup.guard.skipped_updates.total == 1
    if scale is not None:
        assert setup.scaler.get_scale() == scale, "halved, then doubled"


@pytest.mark.parametrize("keeps_gradients", [True, False])
@pytest.mark.parametrize("stepping", [0, 1])
def test_optimizer_that_leaves_an_update_out_is_unscaled_again(
    two_optimizers: Any, stepping: int, keeps_gradients: bool
) -> None:
    """Its gradients may also add up over two updates, although the loss scale changes."""
    waiting = 1 - stepping
    setup = two_optimizers(1024.0, max_grad_norm=0.0)
    backward(setup, 0.25, 0.25)
    setup.guard.clip(setup.model, setup.optimizers[stepping])
    if not keeps_gradients:
        setup.optimizers[waiting].zero_grad()
    step(setup, stepping)
    backward(setup, 0.5, 0.5)
    setup.guard.clip(setup.model, setup.optimizers[stepping])
    step(setup, 0, 1)
    weights = [*setup.model.parameters()]
    expected_of_waiting = -0.75 if keeps_gradients else -0.5
    torch.testing.assert_close(weights[stepping].detach(), torch.full((4,), -0.75))
    torch.testing.assert_close(weights[waiting].detach(), torch.full((4,), expected_of_waiting))


def test_clipping_after_a_step_in_fp16_is_refused(two_optimizers: Any) -> None:
    """The gradients may be old ones, or new ones that are still scaled."""
    setup = two_optimizers(1024.0)
    backward(setup, 0.25, 0.25)
    setup.guard.clip(setup.model, setup.optimizers[0])
    setup.scaler.step(setup.optimizers[0])
    with pytest.raises(UserError, match="after its step: call run"):
        setup.guard.clip(setup.model, setup.optimizers[1])


@pytest.mark.parametrize("is_second_clipped", [True, False])
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_optimizers_of_a_network_may_step_in_turn(
    two_optimizers: Any, scale: float | None, is_second_clipped: bool
) -> None:
    """Each may have a backward pass of its own, as in a GAN that is one module."""
    setup = two_optimizers(scale, max_grad_norm=0.0)
    for _ in range(3):
        for number, is_clipped in enumerate((True, is_second_clipped)):
            backward(setup, 0.25, 0.25)
            if is_clipped:
                setup.guard.clip(setup.model, setup.optimizers[number])
            optimizer = setup.optimizers[number]
            if setup.scaler is None:
                optimizer.step()
            else:
                setup.scaler.step(optimizer)
                setup.scaler.update()
            setup.model.zero_grad()
        setup.guard.end_update()
    for weight in setup.model.parameters():
        torch.testing.assert_close(weight.detach(), torch.full((4,), -0.75))


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_optimizers_may_share_weights(two_optimizers: Any, scale: float | None) -> None:
    """An autoencoder's encoder may have a second optimizer for an adversarial loss."""
    setup = two_optimizers(scale, max_grad_norm=0.0)
    setup.optimizers[0].add_param_group({"params": [setup.model.second]})
    for number, first in ((0, 0.25), (1, 0.0), (0, 0.25), (0, 0.25)):
        backward(setup, first, 0.25)
        setup.guard.clip(setup.model, setup.optimizers[number])
        step(setup, number)
        setup.model.zero_grad()
    torch.testing.assert_close(setup.model.first.detach(), torch.full((4,), -0.75))
    torch.testing.assert_close(setup.model.second.detach(), torch.full((4,), -1.0))


def test_norms_of_layers_are_those_before_clipping() -> None:
    """A layer's norm covers all its weights. A layer without gradients has none."""
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
    model[2].requires_grad_(False)
    optimizer = SimpleNamespace(optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))
    accelerator = alone(unwrap_model=lambda wrapped: wrapped)
    guard = GradientGuard(accelerator, max_grad_norm=1e-3, by_layer=True)
    (100 * model(torch.ones(2, 3)).sum()).backward()
    expected = {}
    for number, layer in enumerate(model[:2]):
        gradients = [parameter.grad.flatten() for parameter in layer.parameters()]
        expected[f"gradients/{number}"] = float(torch.cat(gradients).norm())
    guard.clip(model, optimizer)  # type: ignore[arg-type]
    figures = guard.figures()
    layers = {name: value for name, value in figures.items() if name.startswith("gradients/")}
    assert layers == pytest.approx(expected)
    assert math.hypot(*layers.values()) == pytest.approx(figures["train/grad_norm"])


@pytest.fixture(params=["looks", "on the device", "not fused"])
def guarded(request: pytest.FixtureRequest) -> Any:
    """Return a network with two weights, its optimizer, and a guard, for each way to clip."""
    model = torch.nn.Module()
    model.first, model.second = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    is_fused = request.param != "not fused"
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=is_fused)
    guard = GradientGuard(alone(), max_grad_norm=1.0, by_layer=False)
    guard.reads_norm = request.param == "looks"
    return SimpleNamespace(model=model, optimizer=optimizer, guard=guard)


def test_changes_after_clipping_are_applied_unscaled(guarded: Any) -> None:
    """A copy may add noise or replace a gradient after clipping."""
    model = guarded.model
    optimizer = guarded.optimizer
    model.first.grad = torch.full((4,), 3.0)
    model.second.grad = torch.full((4,), 4.0)
    guarded.guard.clip(model, optimizer)
    assert float(torch.cat([model.first.grad, model.second.grad]).norm()) == pytest.approx(1.0)
    clipped = model.first.grad.clone()
    model.first.grad += 1.0
    model.second.grad = torch.full((4,), -5.0)
    optimizer.step()
    torch.testing.assert_close(model.first.detach(), -(clipped + 1.0))
    torch.testing.assert_close(model.second.detach(), torch.full((4,), 5.0))
    assert float(guarded.guard.logged_norms.grad_norm) == pytest.approx(10.0)


def test_small_gradients_keep_their_bits(guarded: Any) -> None:
    """A norm below the limit gives a factor of exactly 1."""
    guarded.guard.max_grad_norm = 0.3
    gradient = torch.rand(4) / 10
    guarded.model.first.grad = gradient.clone()
    guarded.guard.clip(guarded.model, guarded.optimizer)
    assert torch.equal(guarded.model.first.grad, gradient)


def test_non_finite_update_is_skipped_despite_later_changes(guarded: Any) -> None:
    """A copy may add noise or replace the gradient. The next update is applied."""
    model = guarded.model
    optimizer = guarded.optimizer
    guard = guarded.guard
    model.first.grad = torch.ones(4)
    model.second.grad = torch.full((4,), float("nan"))
    guard.clip(model, optimizer)
    model.first.grad += 1.0
    model.second.grad = torch.nan_to_num(model.second.grad)
    optimizer.step()
    optimizer.zero_grad()
    assert not model.first.any()
    assert not model.second.any()
    model.first.grad = torch.full((4,), 0.25)
    guard.clip(model, optimizer)
    optimizer.step()
    assert torch.equal(model.first.detach(), torch.full((4,), -0.25))
    with pytest.raises(TrainingError):
        guard.check(2, 0.5)


@pytest.mark.parametrize("broken", [0, 1])
def test_one_optimizer_of_two_networks_skips_for_either(guarded: Any, broken: int) -> None:
    """A finite norm of the last clipped network does not override the other's."""
    networks = [torch.nn.Module() for _ in range(2)]
    names = ("first", "second")
    for index, (network, name) in enumerate(zip(networks, names, strict=True)):
        network.weight = getattr(guarded.model, name)
        network.weight.grad = torch.full((4,), float("inf") if index == broken else 0.1)
    for network in networks:
        guarded.guard.clip(network, guarded.optimizer)
    guarded.optimizer.step()
    assert not guarded.model.first.any()
    assert not guarded.model.second.any()


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("resumed_after", [None, 10])
def test_network_that_overflows_in_each_update_ends_the_run(
    broken: int, resumed_after: int | None
) -> None:
    """The finite gradients of the other network do not hide it, also across a resume."""
    networks = [torch.nn.Linear(2, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in networks]

    def new_guard() -> GradientGuard:
        return GradientGuard(alone(scaler=object()), max_grad_norm=1.0, by_layer=False)

    guard = new_guard()
    for step in range(MAX_SKIPS_IN_A_ROW):
        guard.check(step, 0.5)
        for number, (network, optimizer) in enumerate(zip(networks, optimizers, strict=True)):
            for parameter in network.parameters():
                value = float("inf") if number == broken else 0.1
                parameter.grad = torch.full_like(parameter, value)
            guard.clip(network, optimizer)
        if step == resumed_after:
            state = guard.state_dict()
            guard = new_guard()
            guard.load_state_dict(state)
    with pytest.raises(TrainingError, match=f"{MAX_SKIPS_IN_A_ROW} fp16 updates in a row"):
        guard.check(MAX_SKIPS_IN_A_ROW, 0.5)
    assert guard.skipped_updates.total == MAX_SKIPS_IN_A_ROW


@pytest.mark.parametrize("is_optimized", [True, False])
def test_layer_that_is_unfrozen_must_be_in_an_optimizer(is_optimized: bool) -> None:
    """Otherwise it would silently never be updated.

    A layer that never had an optimizer is allowed.
    """
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    layers = [model[1], model[2]] if is_optimized else [model[1]]
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    guard = GradientGuard(alone(), max_grad_norm=1.0, by_layer=False)
    model[2].requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()
    guard.clip(model, optimizer)  # the first layer never had an optimizer, which is allowed
    model.zero_grad()
    model[1].requires_grad_(False)
    model[2].requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    if is_optimized:
        guard.clip(model, optimizer)
        return
    with pytest.raises(UserError, match=r"2\.weight was unfrozen, .* would not be trained"):
        guard.clip(model, optimizer)
