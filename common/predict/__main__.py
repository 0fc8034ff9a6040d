"""Use a model: classify images, or texts of one a line, of files or of standard input.

python -m common.predict RUN FILE... | -

RUN is a run's directory or a `model` folder. For images each FILE is one, or a folder: all images
in it and in its folders, sorted. `-` reads their paths. For texts each FILE has one a line, or two
with a tab between where the model is of pairs. Prints one JSON object for each input. What it
computes is what the run's evaluation computes.
"""

import io
import itertools
import json
import os
import sys
import time
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from common.command_line import tool_parser
from common.config import TrainingConfig
from common.devices import device_name
from common.errors import UserError
from common.files import plain, reading
from common.flags import spelled
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
    print_predictions(predictor, inputs, max(AT_ONCE, given.batch_size), given.top_k)


def print_predictions(
    predictor: Predictor, inputs: Iterator[str], chunk_size: int, top_k: int
) -> None:
    """Print one JSON object for each input, as soon as its chunk is predicted."""
    input_name = "text" if predictor.is_text else "file"
    names = predictor.class_names
    # An escape of a letter that the output can't print would be no JSON.
    escapes_letters = "utf" not in (sys.stdout.encoding or "").lower()
    while chunk := [*itertools.islice(inputs, chunk_size)]:
        # bf16 makes equal probabilities. A stable sort ranks the first class first, as `argmax`.
        ranked = predictor(chunk).sort(descending=True, stable=True)
        probabilities = ranked.values[:, :top_k].tolist()
        classes = ranked.indices[:, :top_k].tolist()
        for text, values, order in zip(chunk, probabilities, classes, strict=True):
            top = {
                names[index]: round(value, 6) for index, value in zip(order, values, strict=True)
            }
            prediction = {
                input_name: text,
                "label": names[order[0]],
                "probability": round(values[0], 6),
                "top": top,
            }
            print(json.dumps(prediction, ensure_ascii=escapes_letters))
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
        if file == "-":
            yield from read_standard_input()
        elif is_text:
            yield from read_texts(file)
        elif os.path.isdir(file):
            yield from images_in(Path(file))
        elif file.strip():
            yield file


def read_standard_input() -> Iterator[str]:
    if sys.stdin is None:
        raise UserError("standard input is closed: name files instead of -")
    with reading("standard input", "pass lines in UTF-8"):
        yield from lines_of(sys.stdin)


def read_texts(file: str) -> Iterator[str]:
    if os.path.isdir(file):
        raise UserError(f"{file} is a folder, and this model reads texts: pass the files in it")
    with reading(file, "pass a file of lines in UTF-8, or - for standard input"):
        text = plain(Path(file)).read_text(encoding="utf-8-sig")
    yield from lines_of(io.StringIO(text))  # `splitlines` would end lines at other characters too


def lines_of(stream: Iterable[str]) -> Iterator[str]:
    for line in stream:
        if line.strip():
            yield line.rstrip("\r\n")


def images_in(folder: Path) -> list[str]:
    """Return the paths of all images in a folder and its folders, sorted; it follows links.

    Names that begin with a full stop are left out, and so is what no image's name ends like.
    """
    endings = {
        ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN
    }
    paths: list[str] = []
    visited: set[str] = set()  # a link may lead to a folder above it

    def refuse(problem: OSError) -> None:
        raise UserError(f"{problem.filename} can't be read: {problem.strerror}")

    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if os.path.realpath(place) in visited:
            folders.clear()
            continue
        visited.add(os.path.realpath(place))
        folders[:] = [name for name in folders if not name.startswith(".")]
        images = [name for name in names if Path(name).suffix.lower() in endings]
        paths += [os.path.join(place, name) for name in images if not name.startswith(".")]
    if not paths:
        raise UserError(f"{folder} holds no images: pass image files, or a folder of them")
    return sorted(paths)


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
    if sys.stdin is not None:
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # type: ignore[union-attr]
    main()
