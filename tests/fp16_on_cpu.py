"""Run a recipe in fp16 on a CPU, where recipes refuse it, with a chosen loss scale. Not a test.

python tests/fp16_on_cpu.py INITIAL_SCALE GROWTH_INTERVAL RECIPE [--FLAG VALUE ...]
"""

import functools
import runpy
import sys

from common.training import precision

SCALE = float(sys.argv[1])
INTERVAL = int(sys.argv[2])
precision.is_offered = lambda precision, use_cpu: True
precision.SharedScaler = functools.partial(  # type: ignore[assignment,misc]
    precision.SharedScaler, init_scale=SCALE, growth_interval=INTERVAL
)
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
