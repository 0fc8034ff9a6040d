"""The records of the new run, as far as they are known before it starts.

They are compared with those of the old run before the training, so that the user sees what differs.
"""

import platform
from dataclasses import replace

import torch

from common.run_directory.provenance import machine_facts
from common.run_directory.records import Attempt, RunConfig, Source
from common.storage.digests import sha256_of_file
from common.system.devices import device_name
from common.system.processor import processor_kind
from common.tools.reproduce.code import RestoredCode
from common.tools.reproduce.compared_run import ComparedRun


def expected_new_run(old: ComparedRun, code: RestoredCode) -> ComparedRun:
    """Return the records of the new run, as far as they are known before it starts.

    The others are those of the old run, so that they do not count as differences.
    """
    return replace(
        old,
        saved_config=expected_config(old, code),
        attempts=[expected_attempt(old.attempt, code)],
    )


def expected_config(old: ComparedRun, code: RestoredCode) -> RunConfig:
    """Return the old run's `config.json` with this machine's device and Python.

    The digest of the recipe is that of the restored code, which may be the current code.
    """
    old_config = old.saved_config
    device = torch.device("cpu")
    if old_config.environment.device_type != "cpu":
        device = torch.accelerator.current_accelerator() or device
    current_facts = {
        "device": device_name(device),
        "device_type": device.type,
        "python": platform.python_version(),
    }
    # The new run gets this variable too. Its instructions then differ from those of this process.
    if "ATEN_CPU_CAPABILITY" not in old.attempt.variables:
        capability = torch.backends.cpu.get_cpu_capability()
        current_facts["processor"] = processor_kind(capability)
    environment = old_config.environment.model_copy(update=current_facts)
    source = Source(sha256=sha256_of_file(code.recipe), changes=old_config.source.changes)
    return old_config.model_copy(update={"environment": environment, "source": source})


def expected_attempt(old_attempt: Attempt, code: RestoredCode) -> Attempt:
    """Return the attempt that the new run will record, with this machine and the restored code."""
    # The new run gets the variables of the old one: see `environment_of`. Other facts that are not
    # known before it starts are also taken from the old run.
    machine = replace(machine_facts(), variables=old_attempt.variables)
    return Attempt(
        **vars(machine),
        global_step=0,
        trees=code.trees,
        imported=old_attempt.imported,
        world_size=old_attempt.world_size,
        threads_per_process=old_attempt.threads_per_process,
        mixed_precision=old_attempt.mixed_precision,
    )
