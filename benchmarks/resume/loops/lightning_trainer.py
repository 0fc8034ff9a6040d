"""Trains with Lightning's Trainer.

python benchmarks/resume/loops/lightning_trainer.py FOLDER PROCESSES

`ModelCheckpoint(every_n_train_steps=..., save_last=True)` saves; `ckpt_path="last"` resumes. The
variant "stateful" has torchdata's `StatefulDataLoader`, whose state Lightning saves and loads.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file: let the package be found
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from benchmarks.resume.attempt import RUN_FOLDER
from benchmarks.resume.recorder import UpdateRecorder
from benchmarks.resume.schedule import BATCH, EPOCHS, SAVE_EVERY, SEED, UPDATES, WARMUP_UPDATES
from benchmarks.resume.task import LEARNING_RATE, Classifier, Digits


class Module(lightning.LightningModule):
    """The classifier with its loss, optimizer and schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Classifier()

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        """Return the loss of a batch, and log it."""
        loss = self.model(**batch)["loss"]
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], number: int) -> None:
        """Log the loss of a validation batch."""
        self.log("val_loss", self.model(**batch)["loss"], sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Return AdamW with linear warm-up and decay, stepped after each update."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)
        scheduler = LambdaLR(optimizer, share_of_peak)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def share_of_peak(update: int) -> float:
    """Return the learning rate of an update, from 0, as a share of the peak."""
    if update < WARMUP_UPDATES:
        return update / WARMUP_UPDATES
    return (UPDATES - update) / (UPDATES - WARMUP_UPDATES)


class Recording(Callback):
    """Records each update when it is done; `ModelCheckpoint` is always called later."""

    def __init__(self, recorder: UpdateRecorder) -> None:
        self.recorder = recorder

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: dict[str, torch.Tensor],
        batch_idx: int,
    ) -> None:
        """Record the samples of the batch."""
        self.recorder.update(trainer.optimizers[0], batch["index"], trainer.current_epoch)


def loader_class(variant: str) -> type[DataLoader[Any]]:
    """Return the class of the loaders."""
    if variant == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader
    return DataLoader


def main(folder: Path, processes: int) -> None:
    """Train, and resume where the attempt says so."""
    recorder = UpdateRecorder(folder)
    attempt = recorder.attempt
    lightning.seed_everything(SEED, workers=True)
    make_loader = loader_class(attempt.variant)
    batch_size = BATCH // processes
    train_loader = make_loader(Digits(folder, "train"), batch_size=batch_size, shuffle=True)
    eval_loader = DataLoader(Digits(folder, "validation"), batch_size=batch_size)
    run_folder = folder / RUN_FOLDER
    checkpoints = ModelCheckpoint(
        dirpath=run_folder / "checkpoints",
        every_n_train_steps=SAVE_EVERY,
        save_top_k=-1,
        save_last=True,
    )
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        max_epochs=EPOCHS,
        callbacks=[Recording(recorder), checkpoints],
        logger=CSVLogger(run_folder, flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        deterministic=True,
        default_root_dir=run_folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    checkpoint = attempt.checkpoint or ("last" if attempt.is_resumed else None)
    trainer.fit(module, train_loader, eval_loader, ckpt_path=checkpoint)
    recorder.finish(module.model)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]))
