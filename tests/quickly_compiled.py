"""Run a recipe whose model is compiled in a fraction of the time, to slower code. Not a test.

python tests/quickly_compiled.py CACHE RECIPE [--FLAG VALUE ...]

CACHE is the folder for compiled code, so that no earlier run has compiled the model already.
"""

import os
import runpy
import sys

os.environ["TORCHINDUCTOR_CACHE_DIR"] = sys.argv[1]
# Without the C++ compiler's optimizations, which take most of the time.
os.environ["TORCHINDUCTOR_DEBUG_COMPILE"] = "1"

from torch._inductor import config, cpp_builder, cpu_vec_isa

# Processes that compile in parallel would each import torch.
config.compile_threads = 1
# To learn whether vector instructions work, torch would compile a program for each kind of them.
cpu_vec_isa.valid_vec_isa_list = list
# Symbols for a debugger, which come with the variable above, would double the compiler's time.
cpp_builder._get_inductor_debug_symbol_cflags = lambda: ([], [])

if __name__ == "__main__":
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
