"""Train in fp16 on a CPU, where the recipes refuse to, with a loss scale as asked: no test itself.

python tests/fp16_on_cpu.py INITIAL_SCALE GROWTH_INTERVAL RECIPE [--FLAG VALUE ...]
"""

import functools
import runpy
import sys

from common.training import accelerator

SCALE, INTERVAL = float(sys.argv[1]), int(sys.argv[2])
accelerator.is_offered = lambda precision, use_cpu: True
accelerator.SharedScaler = functools.partial(  # type: ignore[assignment,misc]
    accelerator.SharedScaler, init_scale=SCALE, growth_interval=INTERVAL
)
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
