"""Classify images, or texts, with the trained model of a run. Prints one JSON object for each.

RUN is a run's directory or a `model` folder.
For images, each FILE is an image, or a folder: all images in it and in its subfolders, sorted. With
- the paths are read from standard input.
For texts, each FILE has one text on each line, or two with a tab between if the model classifies
pairs. With - the texts are read from standard input.
The probabilities are those that the run's evaluation computes.
"""

import argparse
import itertools
import json
import os
import sys
import typing
from collections.abc import Iterator, Sequence

from common.config import TrainingConfig
from common.errors import UserError
from common.flags import check_number
from common.tools.parser import tool_parser

if typing.TYPE_CHECKING:
    from common.tools.predict.predictor import Predictor

MAX_NUMBER = 2**16  # for --batch-size and --top-k
CHUNK_SIZE = 2048  # the number of inputs that are read and predicted at a time
MAX_BENCHMARKED = 10_000  # the most inputs that a benchmark reads


def main(words: Sequence[str] | None = None) -> None:
    """Print the predictions, or the benchmark, that the command line asks for.

    Raises:
        UserError: an argument is wrong, there is no usable model, or the input is empty or can't be
            read.
    """
    arguments = read_command_line(words)
    # These imports load torch, which --help does not need.
    from common.tools.predict.benchmark import benchmark
    from common.tools.predict.inputs import read_inputs
    from common.tools.predict.predictor import Predictor

    if arguments.device is not None:
        use_device(arguments.device)
    predictor = Predictor(
        arguments.run, arguments.batch_size, arguments.mixed_precision, arguments.recipe
    )
    inputs = read_inputs(arguments.files, predictor.is_text)
    # `read_inputs` is lazy, so read one input to find out whether there are any.
    first = next(inputs, None)
    if first is None:
        sources = ["standard input" if file == "-" else file for file in arguments.files]
        raise UserError(
            f"there is nothing to predict in {' '.join(sources)}",
            advice="pass input that is not empty",
        )
    inputs = itertools.chain([first], inputs)
    if arguments.benchmark:
        sample = list(itertools.islice(inputs, MAX_BENCHMARKED))
        print(json.dumps(benchmark(predictor, sample)))
    else:
        chunk_size = max(CHUNK_SIZE, arguments.batch_size)
        print_predictions(predictor, inputs, chunk_size, arguments.top_k)


def read_command_line(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments.

    Raises:
        UserError: a number is out of range.
    """
    precisions = typing.get_args(typing.get_type_hints(TrainingConfig)["mixed_precision"])
    parser = tool_parser("predict", __doc__, "%(prog)s RUN FILE... | - [options]")
    parser.add_argument("run", metavar="RUN", help="a run's directory or model folder")
    parser.add_argument("files", nargs="+", metavar="FILE", help="images or texts; see above")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument("--device", help="such as cpu or cuda:1 (default: the first accelerator)")
    parser.add_argument(
        "--mixed-precision",
        choices=precisions,
        default="auto",
        help="precision of the computation, as in recipes (default: auto)",
    )
    parser.add_argument(
        "--top-k", type=int, default=3, metavar="N", help="classes to print (default: 3)"
    )
    parser.add_argument(
        "--recipe", metavar="FILE", help="the recipe's file, if a copied recipe trained the run"
    )
    parser.add_argument(
        "--benchmark", action="store_true", help="print latency and throughput instead"
    )
    arguments = parser.parse_args(words)
    check_number("batch_size", arguments.batch_size, least=1, most=MAX_NUMBER)
    check_number("top_k", arguments.top_k, least=1, most=MAX_NUMBER)
    return arguments


def use_device(name: str) -> None:
    """Make Accelerate use a device, through the environment variables that it reads.

    Raises:
        UserError: this machine has no such device.
    """
    import torch

    # Without the check, a torch that was built for GPUs names a GPU even if there is none.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    names = ["cpu"]
    if accelerator is not None:
        count = torch.accelerator.device_count()
        names += [accelerator.type, *(f"{accelerator.type}:{index}" for index in range(count))]
    if name not in names:
        raise UserError(
            f"this machine has no device {name}", advice=f"pass --device {' or '.join(names)}"
        )
    os.environ["ACCELERATE_USE_CPU"] = str(name == "cpu").lower()
    if name != "cpu":
        os.environ["ACCELERATE_TORCH_DEVICE"] = name


def print_predictions(
    predictor: "Predictor", inputs: Iterator[str], chunk_size: int, top_k: int
) -> None:
    """Print one JSON object for each input, as soon as its chunk is predicted."""
    input_name = "text" if predictor.is_text else "file"
    names = predictor.class_names
    # Encodings other than UTF lack some letters, so JSON must escape them.
    escapes_letters = "utf" not in (sys.stdout.encoding or "").lower()
    while chunk := [*itertools.islice(inputs, chunk_size)]:
        # In bf16, several classes may be equally probable. A stable sort ranks the first of them
        # first, so the label is that of `argmax`, by which evaluations count.
        ranked = predictor(chunk).sort(descending=True, stable=True)
        probabilities = ranked.values[:, :top_k].tolist()
        classes = ranked.indices[:, :top_k].tolist()
        for sample, values, indices in zip(chunk, probabilities, classes, strict=True):
            top: dict[str, float] = {}
            for index, value in zip(indices, values, strict=True):
                top[names[index]] = round(value, 6)
            prediction = {
                input_name: sample,
                "label": names[indices[0]],
                "probability": round(values[0], 6),
                "top": top,
            }
            print(json.dumps(prediction, ensure_ascii=escapes_letters))
        sys.stdout.flush()
