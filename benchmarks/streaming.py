"""Stream more images than memory holds through two processes that are killed twice.

python benchmarks/streaming.py --gigabytes 20 --folder FOLDER

The script writes that many bytes of random images (uncompressed bitmaps) as parquet shards. With
`--links N` it writes only one Nth of them, and gives each shard N names: there is as much to read,
but less on the disk.

It trains an MLP on the images for an epoch, and kills all processes at one third and at two thirds
of it. It shows the memory of the processes over time, and whether each sample was trained on
exactly once.
"""

import argparse
import io
import json
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):  # started as a file: let the package be found
    sys.path[0] = str(REPOSITORY)

# It runs a recipe and records each batch's samples.
RECORDER = REPOSITORY / "tests" / "record_samples.py"
IMAGE_SIZE = 256  # pixels of a side
GROUP_IMAGES = 100  # images of a row group
SHARD_GROUPS = 50  # row groups of a shard
IMAGE_BYTES = 3 * IMAGE_SIZE * IMAGE_SIZE  # without the header
BATCH_SIZE = 64  # of each process
KILLED_AT = (1 / 3, 2 / 3)  # share of the epoch
SECONDS_BETWEEN_LOOKS = 1
LOG_CHARACTERS = 3000  # of the log's end, shown when training fails

BatchKey = tuple[int, int, int, int]  # epoch, update, micro-batch, rank


def write_shards(folder: Path, gigabytes: float, links: int) -> int:
    """Write shards for training and a small one for the test; return their size in bytes."""
    random = np.random.default_rng(0)
    header = bitmap_header()
    shard_bytes = (len(header) + IMAGE_BYTES) * GROUP_IMAGES * SHARD_GROUPS
    shards = max(1, round(gigabytes * 10**9 / (shard_bytes * links)))
    folder.mkdir(parents=True)
    for number in range(shards):
        shard = folder / f"train-{number:05d}.parquet"
        write_shard(shard, SHARD_GROUPS, header, random)
        for link in range(1, links):
            shard.with_name(f"{shard.stem}-{link}.parquet").hardlink_to(shard)
    write_shard(folder / "test-0.parquet", 1, header, random)
    return sum(path.stat().st_size for path in folder.iterdir())


def bitmap_header() -> bytes:
    """Return the header of a bitmap, before the bytes of its pixels."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE)).save(file, "BMP")
    return file.getvalue()[:-IMAGE_BYTES]


def write_shard(path: Path, groups: int, header: bytes, random: np.random.Generator) -> None:
    """Write a shard of `groups` row groups of random images with labels 0 and 1 in turn."""
    import pyarrow
    from datasets import ClassLabel, Features, Image
    from pyarrow.parquet import ParquetWriter

    features = Features({"image": Image(), "label": ClassLabel(names=["even", "odd"])})
    schema = features.arrow_schema
    with ParquetWriter(
        path, schema, compression="none", use_dictionary=False, write_statistics=False
    ) as writer:
        for _ in range(groups):
            images = [header + random.bytes(IMAGE_BYTES) for _ in range(GROUP_IMAGES)]
            columns = {
                "image": [{"bytes": image, "path": None} for image in images],
                "label": [number % 2 for number in range(GROUP_IMAGES)],
            }
            writer.write_table(pyarrow.table(columns, schema=schema))


def run_until(
    command: list[str], epoch: float | None, folder: Path, memory: list[float]
) -> int | None:
    """Run a training until it has reached `epoch`, then kill all its processes.

    Args:
        epoch: None to run to the end.
        folder: has the run's directory; the log is written there.
        memory: takes the resident memory of the largest process in MiB, once a second.

    Returns:
        The exit status, or None if the training was killed.
    """
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        launcher = psutil.Popen(command, stdout=log, stderr=log, cwd=REPOSITORY)
    while launcher.poll() is None:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        processes = [launcher, *launcher.children(recursive=True)]
        memory.append(largest_mebibytes(processes))
        if epoch is not None and reached_epoch(folder / "run" / "metrics.jsonl") >= epoch:
            for process in processes:
                if process.is_running():
                    process.kill()
            launcher.wait()
            return None
    return launcher.returncode


def largest_mebibytes(processes: list[psutil.Process]) -> float:
    """Return the resident memory of the largest process that is still there."""
    largest = 0.0
    for process in processes:
        try:
            largest = max(largest, process.memory_info().rss / 2**20)
        except psutil.Error:
            continue
    return largest


def reached_epoch(metrics: Path) -> float:
    """Return how many epochs the run has logged, with fractions; 0 before the first line."""
    from common.storage.json_files import read_lines

    rows = read_lines(metrics, key="progress/epoch")
    return float(rows[-1]["progress/epoch"]) if rows else 0.0


def read_samples(folder: Path) -> list[int]:
    """Return the samples of all updates that the recorder has seen, each update once.

    An update after the last checkpoint before a kill is trained again. Its samples must be the
    same both times.
    """
    batches: dict[BatchKey, list[int]] = {}
    for path in folder.glob("*-rank-*.jsonl"):
        rank = int(path.stem.rpartition("-")[2])
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.endswith("]"):  # cut off by a kill
                continue
            epoch, update, micro_batch, samples = json.loads(line)
            key = (epoch, update, micro_batch, rank)
            earlier = batches.setdefault(key, samples)
            assert earlier == samples, f"{key} had other samples when it was trained again"
    return [sample for samples in batches.values() for sample in samples]


def training_command(folder: Path) -> list[str]:
    """Return the command that trains on the shards, in two processes."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    launcher += ["--config_file", "accelerate_configs/multi_cpu.yaml"]
    recipe = [str(RECORDER), str(folder / "samples"), "recipes/mnist_mlp.py"]
    flags = ["--dataset", str(folder / "data"), "--streaming", "--epochs", "1", "--image-size", "8"]
    flags += ["--batch-size", str(BATCH_SIZE), "--checkpoint-every", "20", "--log-every", "5"]
    flags += ["--hidden-sizes", "32", "--tracker", "none", "--output-dir", str(folder / "run")]
    return [*launcher, *recipe, *flags]


def train_with_kills(folder: Path) -> None:
    """Train for an epoch with kills, and print the memory of each attempt.

    Raises:
        SystemExit: with the exit status of the last attempt, if it fails.
    """
    command = training_command(folder)
    for attempt, epoch in enumerate((*KILLED_AT, None), start=1):
        memory: list[float] = []
        resume = [] if attempt == 1 else ["--resume", "auto"]
        status = run_until([*command, *resume], epoch, folder, memory)
        quarters = [f"{part.max():,.0f}" for part in np.array_split(memory, 4) if len(part)]
        end = "killed" if status is None else f"ended with {status}"
        print(f"attempt {attempt}, {end}: MiB of the largest process {quarters}", flush=True)
    if status:
        print((folder / "log.txt").read_text(encoding="utf-8")[-LOG_CHARACTERS:])
        raise SystemExit(status)


def main() -> None:
    """Write the shards, train on them with kills, and print the samples and the speed."""
    from common.run_directory.record_files import read_record
    from common.run_directory.records import Summary

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=20, help="size of the data set")
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder to make, removed at the end"
    )
    parser.add_argument("--links", type=int, default=1, help="number of names of each shard")
    options = parser.parse_args()
    folder = options.folder.resolve()
    began = time.monotonic()
    written = write_shards(folder / "data", options.gigabytes, options.links)
    seconds = f"{time.monotonic() - began:.0f} s"
    print(f"{written / 1e9:.1f} GB, shards of {options.links} names each: {seconds}", flush=True)
    began = time.monotonic()
    train_with_kills(folder)
    samples = read_samples(folder / "samples")
    figures = read_record(folder / "run" / "summary.json", Summary).figures
    different = len(set(samples))
    print(f"{len(samples):,} samples, {different:,} of them different, of {max(samples) + 1:,}")
    print(f"{figures['perf/samples_per_second']:,.0f} samples/s; {time.monotonic() - began:.0f} s")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
