"""The full names of the metrics that the library itself logs; each is stated here alone.

This module imports nothing. So the meters that compute a metric and the tools that read it can both
import its name.
"""

STEP = "progress/global_step"
EPOCH = "progress/epoch"
SAMPLES = "progress/samples"
EXPORTED_STEP = "progress/kept_step"

TRAINING_LOSS = "train/loss"
LEARNING_RATE = "train/learning_rate"  # a further group of parameters has `LEARNING_RATE/group`
GRADIENT_NORM = "train/grad_norm"
LOSS_SCALE = "train/loss_scale"
SKIPPED_UPDATES = "train/skipped_updates"

THROUGHPUT = "perf/samples_per_second"
THROUGHPUT_PER_DEVICE = "perf/samples_per_second_per_device"
TOKEN_THROUGHPUT = "perf/tokens_per_second"
STEP_MILLISECONDS = "perf/step_milliseconds"
DATA_WAIT = "perf/data_wait_fraction"
TFLOPS_PER_DEVICE = "perf/tflops_per_device"
MFU = "perf/mfu"
GOODPUT = "perf/goodput"
OTHER_CPU = "perf/other_cpu_fraction"  # share of the machine's CPU time that other programs used
JOULES_PER_SAMPLE = "perf/joules_per_sample"

PEAK_ALLOCATED = "memory/peak_allocated_mib"
ALLOCATED = "memory/allocated_mib"
PEAK_RESERVED = "memory/peak_reserved_mib"
HOST_MEMORY = "memory/host_rss_mib"

GPU_UTILIZATION = "gpu/utilization"
MIN_GPU_UTILIZATION = "gpu/utilization_min"
GPU_POWER = "gpu/power_watts"

TRAINING_SECONDS = "time/train_seconds"
TOTAL_SECONDS = "time/total_seconds"
COMPILE_SECONDS = "time/compile_seconds"
