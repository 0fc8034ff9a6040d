"""The libraries that torch computes with, on which the last bits of its results depend."""

import torch


def library_versions() -> dict[str, str]:
    """Return the versions of torch's libraries, and the instructions that its CPU kernels use.

    A library that this build of torch lacks is left out.
    """
    versions = {
        "cpu instructions": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
    }
    return {name: str(version) for name, version in versions.items() if version is not None}
