"""A simulated accelerator, on which tests run the real recipes and tools.

The device "simulated" is torch's PrivateUse1 device, registered from Python. ``torch.accelerator``
finds it, and `common/system/devices/` asks it what it can do, as it asks a GPU. Its tensors have
storage of their own in the host's memory (`memory.py`), and each kernel runs the CPU's kernel on
that memory (`kernels.py`). Autograd, autocast (`autocast.py`), fused optimizers, DDP and FSDP2 are
torch's own.

It differs from a CPU as follows:

- It has no float64: such a tensor is a `TypeError`, as on Apple's MPS.
- Fused optimizers ignore `grad_scale` and `found_inf`, as on MPS, or do not exist.
- Copies without a wait arrive late, and it is an error to change or free their memory meanwhile
  (`streams.py`). The host can pin memory for it only in some variants (`pinned.py`).
- Operations refuse to mix its tensors with those of the host.
- It has random numbers, streams and events of its own.
- Its collectives refuse tensors of the host, as NCCL does (`collectives.py`).

`Variant` in `device.py` changes this for a process. `launch.py` runs a script on the device, and
tests call the functions of `runs.py`. A process that has the device keeps it, so pytest itself
never installs it.

The device lacks the following, because torch takes it from C++ alone:

- `torch.Generator` objects, pinned memory and memory statistics of ``torch.accelerator``. Variants
  have the latter two as functions of Python: where C++ code asks for them, they are missing.
- Kernels that run late. All run at once, so a missing wait shows only where a copy is late.
- Streams of torch's autograd and FSDP2: torch's C++ code sees the default stream alone.
- Storages that change their size: what FSDP2 frees stays allocated.
- `torch.compile`, CUDA graphs, profiling, and several devices in one process. Accelerate knows
  several processes on a device by a list of vendors, so `collectives.py` adds this device to it.
"""
