"""Says at a resume which changes since the last attempt may change the last bits of a run."""

from common.console import say
from common.run_directory.records import Environment
from common.system.wording import counted, listed

PACKAGES_WITHOUT_EFFECT = ("wandb",)  # it records figures and computes none


def say_changed_environment(before: Environment, now: Environment) -> None:
    """Say on rank 0 if a run continues where its bits can't equal those of an uninterrupted run.

    Args:
        before: the environment of the attempt that wrote `config.json`.
        now: the environment of this attempt.
    """
    if before.device_type != now.device_type:
        say(
            f"the run continues on {now.device_type} instead of {before.device_type}, so metrics "
            "differ by rounding, and random numbers such as those of dropout differ"
        )
        return
    changes = changes_of_bits(before, now)
    if changes:
        say(
            f"the run continues with {listed(changes)}, so its figures may differ by rounding from "
            "those of an uninterrupted run"
        )


def changes_of_bits(before: Environment, now: Environment) -> list[str]:
    """Return the facts that may change the last bits, such as "torch 2.13.0 instead of 2.11.0"."""
    changes = []
    if now.world_size != before.world_size:
        processes = counted(now.world_size, "process", "processes")
        changes.append(f"{processes} instead of {before.world_size}")
    is_on_cpu = now.device_type == "cpu"
    hardware = now.processor if is_on_cpu else now.device
    hardware_before = before.processor if is_on_cpu else before.device
    if hardware != hardware_before:
        changes.append(f"{hardware} instead of {hardware_before}")
    if is_on_cpu and now.threads_per_process != before.threads_per_process:
        threads = f"a thread count of {now.threads_per_process}"
        changes.append(f"{threads} instead of {before.threads_per_process}")
    for name, version in now.versions.items():
        version_before = before.versions.get(name, version)
        if version != version_before and name not in PACKAGES_WITHOUT_EFFECT:
            changes.append(f"{name} {version} instead of {version_before}")
    return changes
