"""Whether torch.compile can produce kernels for a device, and record them as graphs."""

import torch

from common.system.devices.trials import tried_once


@tried_once
def has_compiler(device: torch.device) -> bool:
    """Whether torch.compile's Inductor generates kernels for `device`.

    Torch has no public query for this. Its code generators register for the types that they serve.
    """
    try:
        from torch._inductor.codegen import common as codegen

        codegen.init_backend_registration()
        return codegen.get_scheduling_for_device(device.type) is not None
    except (AttributeError, ImportError):
        return True  # another version of torch, which itself reports what it can't compile


def can_launch_graphs(device: torch.device) -> bool:
    """Whether a device can launch all kernels of a compiled model at once, as CUDA graphs do."""
    # Torch's compiler records graphs on this type of device alone, which includes AMD's GPUs.
    return device.type == "cuda"
