"""Use a model: classify images, or texts of one a line, of files or of standard input.

python -m common.predict RUN FILE... | -

RUN is a run's directory or a `model` folder. For images each FILE is one, and `-` reads their
paths; for texts each FILE has one a line, or two with a tab between where the model is of pairs.
Prints one JSON object for each. What it computes is what the run's evaluation computes.
"""

import io
import itertools
import json
import os
import signal
import sys
import time
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from common.command_line import tool_parser
from common.config import TrainingConfig
from common.errors import UserError
from common.files import reading
from common.flags import spelled
from common.machine import device_name
from common.predict.predictor import Predictor

MOST = 2**16  # inputs of a batch
AT_ONCE = 2048  # inputs that are read before the first is predicted
WARM_UP, FEWEST, SECONDS = 3, 20, 5.0  # batches before measuring, and how long one measures


def main(words: Sequence[str] | None = None) -> None:
    precisions = typing.get_args(typing.get_type_hints(TrainingConfig)["mixed_precision"])
    parser = tool_parser("common.predict", __doc__)
    parser.add_argument("run", metavar="RUN", help="as above")
    parser.add_argument("files", nargs="+", metavar="FILE", help="as above")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument("--device", help="such as cpu or cuda:1 (default: the first there is)")
    parser.add_argument("--mixed-precision", choices=precisions, default="auto", help="as recipes")
    parser.add_argument("--top-k", type=int, default=3, metavar="N", help="classes (default: 3)")
    parser.add_argument("--recipe", metavar="FILE", help="of the model, if it is a copy of one")
    parser.add_argument("--benchmark", action="store_true", help="print latency and throughput")
    given = parser.parse_args(words)
    for name in ("batch_size", "top_k"):
        if not 1 <= getattr(given, name) <= MOST:
            raise UserError(f"{spelled(name)} takes 1 to {MOST:,}")
    if given.device is not None:
        choose_device(given.device)
    predictor = Predictor(given.run, given.batch_size, given.mixed_precision, given.recipe)
    inputs = read_inputs(given.files, predictor.is_text)
    first = next(inputs, None)
    if first is None:
        raise UserError(f"{' '.join(given.files)}: nothing to predict, they are empty")
    inputs = itertools.chain([first], inputs)
    if given.benchmark:
        print(json.dumps(benchmark(predictor, [*itertools.islice(inputs, 10_000)])))
        return
    kind, names = "text" if predictor.is_text else "file", predictor.class_names
    while some := [*itertools.islice(inputs, max(AT_ONCE, given.batch_size))]:
        # Of equal ones, which bf16 makes, the first: as `argmax` has it, and `topk` has not.
        ranked = predictor(some).sort(descending=True, stable=True)
        values, indices = (found[:, : given.top_k] for found in ranked)
        for one, best, order in zip(some, values.tolist(), indices.tolist(), strict=True):
            top = {names[index]: round(value, 6) for index, value in zip(order, best, strict=True)}
            found = {"label": names[order[0]], "probability": round(best[0], 6), "top": top}
            print(json.dumps({kind: one, **found}, ensure_ascii=False))
        sys.stdout.flush()


def choose_device(name: str) -> None:
    """Have Accelerate take a device, by the variables that it reads."""
    kind, there = torch.accelerator.current_accelerator(), ["cpu"]
    if kind is not None:
        count = torch.accelerator.device_count()
        there += [kind.type, *(f"{kind.type}:{index}" for index in range(count))]
    if name not in there:
        raise UserError(f"--device {name} is not here: pass {' or '.join(there)}")
    variable = "ACCELERATE_USE_CPU" if name == "cpu" else "ACCELERATE_TORCH_DEVICE"
    os.environ[variable] = "true" if name == "cpu" else name


def read_inputs(files: Sequence[str], is_text: bool) -> Iterator[str]:
    """Yield texts, or paths of images, without empty lines."""
    for file in files:
        if file == "-" or is_text:
            with reading("standard input" if file == "-" else file, "pass lines in UTF-8"):
                whole = "" if file == "-" else Path(file).read_text(encoding="utf-8-sig")
                lines = sys.stdin if file == "-" else io.StringIO(whole)  # not `splitlines`
                yield from filter(str.strip, (line.rstrip("\r\n") for line in lines))
        elif file.strip():
            yield file


def benchmark(predictor: Predictor, inputs: Sequence[str]) -> dict[str, object]:
    """Return latency of a batch, from files or texts to probabilities on the host."""
    endless, taken = itertools.cycle(inputs), list[float]()
    while len(taken) < WARM_UP + FEWEST or sum(taken) < SECONDS:
        began, batch = time.perf_counter(), itertools.islice(endless, predictor.batch_size)
        predictor([*batch])
        taken.append(time.perf_counter() - began)
    p50, p95 = np.percentile(taken[WARM_UP:], (50, 95)) * 1000
    return {
        "p50_milliseconds": round(p50, 3),
        "p95_milliseconds": round(p95, 3),
        "samples_per_second": round(predictor.batch_size / float(np.mean(taken[WARM_UP:])), 1),
        "batch_size": predictor.batch_size,
        "batches": len(taken) - WARM_UP,
        "device": device_name(predictor.accelerator.device),
        "mixed_precision": predictor.accelerator.mixed_precision,
    }


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # of `| head`
    for stream, errors in ((sys.stdin, "strict"), (sys.stdout, "backslashreplace")):
        stream.reconfigure(encoding="utf-8", errors=errors)  # type: ignore[union-attr]
    main()
