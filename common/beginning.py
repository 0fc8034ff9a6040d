"""How a run begins: weights or a checkpoint, its files, its trackers, what it shows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from common import report
from common.batch_size import fit_batch_size
from common.export import load_weights
from common.facts import describe_run
from common.flops import ComputeLoss
from common.memory_plan import MemoryPlan
from common.optimizers import start_momentum
from common.persistence import restore_random_state, restore_run
from common.resume import read_json

if TYPE_CHECKING:
    from common.run import Run


def start(run: Run, compute_loss: ComputeLoss) -> None:
    """Do what `Run.start` promises, once the run knows its model and optimizer."""
    start_momentum(run.optimizer.optimizer)
    if run.config.auto_batch_size:
        fit_batch_size(run, run.all_loaders, compute_loss)
    config, data = run.config, run.data
    if not config.evaluate_only:
        samples = data.splits["train"]
        run.meters.find_flops(run.unwrapped, compute_loss, samples, run.compute_dtype)
    if config.init_from is not None:
        load_weights(run.unwrapped, config.init_from)
    local = Path(data.source.location).is_absolute()
    config.dataset = data.source.location if local else data.source.name
    config.dataset_config = data.source.configuration
    run.memory_plan = MemoryPlan(run.accelerator, run.model, run.optimizer)
    run.facts = facts = describe_run(run)
    if config.resume is not None:
        saved = read_json(run.directory.path / "config.json")
        facts |= {name: saved[name] for name in ("given", "wandb_run_id") if name in saved}
        restore_run(run)
    run.directory.write_status("running", run.global_step)
    run.directory.write("config.json", facts)
    run.tracking.start(
        config,
        facts,
        config.run_name or run.directory.path.name,
        facts["wandb_run_id"],
        # What is still to be written of the last step is in the checkpoint.
        run.directory.cut_metrics(run.global_step - bool(run.logbook.pending)),
    )
    report.show_plan(facts, f"{run.directory.path}; {run.tracking.shown}")
    run.logbook.open_display(run.plan.total_steps, run.global_step)
    restore_random_state(run)
