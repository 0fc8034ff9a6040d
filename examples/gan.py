"""Train a GAN that draws digits: two networks, each with its own optimizer and schedule.

    python examples/gan.py

A copy of recipes/mnist_mlp.py. It shows several networks in one checkpoint, a loop with two
optimizers, and an objective that compares distributions: the Fréchet distance between the pixels
of generated and of real images.

Result: Fréchet distance 18.0 on test data (untrained: 60).
One run with the default flags: torch 2.13, bf16, two cores of an AMD EPYC.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from common.config import TrainingConfig, parse_config
from common.data.images import ImageData, load_images
from common.data.loader import Loader
from common.data.samples import Batch
from common.data.sources import choose_source
from common.flags import flag
from common.measure.sums import Sums, Totals
from common.models.compile import compile_model
from common.run import Run
from common.training.optim import decay_groups

# ------------------------------------------------------------------------------------- Config


@dataclass(kw_only=True)
class Config(TrainingConfig):
    batch_size: int = 64  # Samples per process and micro-batch.
    # Peak learning rate of the generator; the discriminator's is twice as high.
    learning_rate: float = 2e-3
    weight_decay: float = 0.0  # Decay of weight matrices; biases have none.
    # Widths of the hidden layers.
    hidden_sizes: tuple[int, ...] = flag((128, 128), least=1, most=10**6, role="size")
    # Size of the noise that an image is drawn from.
    noise_size: int = flag(32, least=1, most=10**6, role="size")
    # Height and width in pixels (default: by data set, at most 224).
    image_size: int | None = flag(None, least=1, most=65536, role="size")
    image_column: str | None = flag(None, role="data")  # Column of images, if it can't be inferred.


OBJECTIVE = "frechet:min"
DEFAULT_EPOCHS = {"mnist": 20, "digits": 25, "synthetic": 1, "other": 20}
DEFAULT_SIZES = {"synthetic": 28}  # pixels

# --------------------------------------------------------------------------------------- Data


def load_data(config: Config, run: Run) -> ImageData:
    source = choose_source(
        config, run.accelerator, public="mnist", built_in="digits", public_on_cpu=True
    )
    return load_images(
        source,
        image_size=config.image_size or DEFAULT_SIZES.get(source.name),
        image_column=config.image_column,
        label_column=config.label_column,
        dtype=run.compute_dtype,
    )


# -------------------------------------------------------------------------------------- Model


class MLP(nn.Module):
    """Linear layers with leaky ReLU between: [batch, first size] to [batch, last size]."""

    def __init__(self, sizes: list[int], is_normalized: bool):
        super().__init__()
        layers: list[nn.Module] = []
        for in_features, width in pairwise(sizes[:-1]):
            norm = [nn.BatchNorm1d(width)] if is_normalized else []
            layers += [nn.Linear(in_features, width), *norm, nn.LeakyReLU(0.2)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(sizes[-2], sizes[-1])

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(features))


def build_model(config: Config, data: ImageData) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    sizes = [config.noise_size, *config.hidden_sizes, data.channels * data.image_size**2]
    arguments: dict[str, Any] = {"sizes": sizes, "is_normalized": True}
    discriminator = MLP([*sizes[:0:-1], 1], is_normalized=False)  # from pixels to one logit
    name = f"GAN {'-'.join(map(str, sizes))}"
    facts = {"name": name, "arguments": arguments, **data.preprocessing()}
    return MLP(**arguments), discriminator, facts


def compute_losses(
    run: Run, generator: nn.Module, discriminator: nn.Module, batch: Batch, noise_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the losses of generator and discriminator, and logits: real images, then drawn."""
    real = batch["images"].flatten(1).float()
    drawn = generator(torch.randn(len(real), noise_size, device=run.device))
    logits = discriminator(torch.cat([real, drawn.detach()])).squeeze(1)
    bare = run.accelerator.unwrap_model(discriminator)
    bare.requires_grad_(False)  # the generator's loss must not train the discriminator
    generator_loss = F.softplus(-bare(drawn)).mean()
    bare.requires_grad_(True)
    discriminator_loss = F.binary_cross_entropy_with_logits(logits, is_real(logits).float())
    return generator_loss, discriminator_loss, logits


def is_real(logits: torch.Tensor) -> torch.Tensor:
    """Return a mask of the real images' logits, which are the first half."""
    return torch.arange(len(logits), device=logits.device) < len(logits) // 2


def metrics(loss: torch.Tensor, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"discriminator_loss": loss, "discriminator_accuracy": (logits > 0) == is_real(logits)}


# --------------------------------------------------------------------------------- Evaluation


def evaluate(run: Run, model: nn.Module, loader: Loader, noise_size: int) -> dict[str, float]:
    sums = Sums(run.accelerator, frechet)
    with run.evaluating(model) as bare_model:  # draws the same random numbers each time
        for batch in loader:
            real = batch["images"].flatten(1).double()
            drawn = bare_model(torch.randn(len(real), noise_size, device=run.device)).double()
            products = {"real_products": real.T @ real, "drawn_products": drawn.T @ drawn}
            sums.add(len(real), real=real.sum(0), drawn=drawn.sum(0), **products)
    return sums.result()


def frechet(totals: Totals) -> dict[str, torch.Tensor]:
    """Return the Fréchet distance (arXiv 1706.08500) from sums of pixels and of their products."""
    count = totals["count"]
    means = {name: totals[name] / count for name in ("real", "drawn")}
    real, drawn = (
        totals[f"{name}_products"] / count - torch.outer(mean, mean) for name, mean in means.items()
    )
    shared = torch.linalg.eigvals(real @ drawn).real.clamp(min=0).sqrt().sum()  # trace of a root
    apart = (means["real"] - means["drawn"]).square().sum()
    return {"frechet": apart + real.trace() + drawn.trace() - 2 * shared}


# --------------------------------------------------------------------------------------- Main


def main(config: Config) -> None:
    with Run(config, __file__, OBJECTIVE) as run:
        accelerator = run.accelerator
        data = load_data(config, run)
        # No need to prepare the loaders: each yields its own process's samples, on its device.
        train_loader, validation_loader, test_loader = run.loaders(data)
        run.make_plan(train_loader, DEFAULT_EPOCHS)

        generator, discriminator, description = build_model(config, data)
        networks = []  # each with its optimizer and scheduler
        for model, rate_factor in ((generator, 1), (discriminator, 2)):
            if config.compile:
                compile_model(model, config)
            groups = decay_groups(model, config.weight_decay)
            optimizer = torch.optim.AdamW(
                groups, lr=rate_factor * config.learning_rate, betas=(0.5, 0.999), fused=True
            )
            scheduler = run.plan.schedule(optimizer, warmup_share=0.1)
            networks.append(accelerator.prepare(model, optimizer, scheduler))
        (model, optimizer, scheduler), (discriminator, optimizer_d, scheduler_d) = networks
        run.keep(
            model=model,  # the generator: what is evaluated, and kept at the end
            optimizer=optimizer,
            scheduler=scheduler,
            discriminator=discriminator,
            optimizer_d=optimizer_d,
            scheduler_d=scheduler_d,
        )
        run.start(description)  # resumes, opens the logs, shows the plan

        for batch in run.batches(train_loader):
            if run.should_evaluate:  # at the top: a resumed run repeats an interrupted evaluation
                run.log(evaluate(run, model, validation_loader, config.noise_size))
            if run.should_stop:  # by --early-stopping
                break
            with accelerator.accumulate(model, discriminator):
                loss, loss_d, logits = compute_losses(
                    run, model, discriminator, batch, config.noise_size
                )
                accelerator.backward(loss + loss_d)  # no weight takes part in both
                if accelerator.sync_gradients:
                    for network, network_optimizer, _ in networks:
                        run.clip_grad_norm_(network, network_optimizer)
                for _, network_optimizer, network_scheduler in networks:
                    network_optimizer.step()
                    network_scheduler.step()
                    network_optimizer.zero_grad()
            run.record(loss, metrics(loss_d, logits))
            if run.should_save:
                run.save()

        if run.should_evaluate:
            run.log(evaluate(run, model, validation_loader, config.noise_size))
        run.load_best(model)  # unless --keep last
        run.finish(evaluate(run, model, test_loader, config.noise_size))


if __name__ == "__main__":
    main(parse_config(Config, __doc__))
