"""Stream more images than memory holds through two processes that are killed twice.

python benchmarks/streaming.py --gigabytes 20 --folder FOLDER

Writes that many bytes of random images (uncompressed bitmaps) as parquet shards, with `--links N`
only one Nth of them, each under N names, which is as much to read but takes less of the disk;
trains an MLP on them for an epoch, and kills all processes at a third and at two thirds of it.
Shows the memory of the processes over time, and whether each sample was trained on exactly once.
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
SIZE, GROUP, GROUPS = 256, 100, 50  # pixels; images of a row group; row groups of a shard
BATCH = 64  # of each process
RECORD = REPOSITORY / "tests" / "recorded.py"


def write_shards(folder: Path, gigabytes: float, links: int) -> int:
    """Write shards for training and a small one for the test; return their bytes."""
    import pyarrow
    from datasets import ClassLabel, Features, Image
    from PIL import Image as PillowImage
    from pyarrow.parquet import ParquetWriter

    features = Features({"image": Image(), "label": ClassLabel(names=["even", "odd"])})
    file, random = io.BytesIO(), np.random.default_rng(0)
    PillowImage.new("RGB", (SIZE, SIZE)).save(file, "BMP")
    header = file.getvalue()[: -3 * SIZE * SIZE]
    size = len(file.getvalue()) * GROUP * GROUPS * links
    shards = max(1, round(gigabytes * 10**9 / size))
    folder.mkdir(parents=True)
    for name in (*(f"train-{shard:05d}" for shard in range(shards)), "test-0"):
        plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        with ParquetWriter(folder / f"{name}.parquet", features.arrow_schema, **plain) as writer:
            for _ in range(GROUPS if name != "test-0" else 1):
                images = [header + random.bytes(3 * SIZE * SIZE) for _ in range(GROUP)]
                columns = {
                    "image": [{"bytes": image, "path": None} for image in images],
                    "label": [number % 2 for number in range(GROUP)],
                }
                writer.write_table(pyarrow.table(columns, schema=features.arrow_schema))
        for link in range(1, links if name != "test-0" else 1):
            (folder / f"{name}-{link}.parquet").hardlink_to(folder / f"{name}.parquet")
    return sum(path.stat().st_size for path in folder.iterdir())


def watch(command: list[str], until: float, log: Path, memory: list[float]) -> int | None:
    """Run until an epoch's share `until`, then kill all of it; note the largest process's MiB."""
    with log.open("a", encoding="utf-8") as said:
        job = psutil.Popen(command, stdout=said, stderr=said, cwd=REPOSITORY)
    metrics = log.parent / "run" / "metrics.jsonl"
    while job.poll() is None:
        time.sleep(1)
        tree = [job, *job.children(recursive=True)]
        sizes = []
        for process in tree:
            try:
                sizes.append(process.memory_info().rss / 2**20)
            except psutil.Error:
                continue
        memory.append(max(sizes, default=0.0))
        lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
        if lines and lines[-1].endswith("}") and json.loads(lines[-1])["progress/epoch"] >= until:
            for process in tree:
                if process.is_running():
                    process.kill()
            job.wait()
            return None
    return job.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument(
        "--folder", type=Path, required=True, help="is made, and removed at the end"
    )
    parser.add_argument("--links", type=int, default=1, help="names of each shard")
    options = parser.parse_args()
    folder, began = options.folder.resolve(), time.monotonic()
    written = write_shards(folder / "data", options.gigabytes, options.links)
    seconds = f"{time.monotonic() - began:.0f} s"
    print(f"{written / 1e9:.1f} GB, shards of {options.links} names each: {seconds}", flush=True)
    run, samples = folder / "run", folder / "samples"
    launch = [
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        "accelerate_configs/multi_cpu.yaml",
    ]
    command = [sys.executable, *launch, str(RECORD), str(samples), "recipes/mnist_mlp.py"]
    flags = ["--dataset", str(folder / "data"), "--streaming", "--epochs", "1", "--image-size", "8"]
    flags += ["--batch-size", str(BATCH), "--checkpoint-every", "20", "--log-every", "5"]
    flags += ["--hidden-sizes", "32", "--tracker", "none", "--output-dir", str(run)]
    began = time.monotonic()
    for attempt, until in enumerate((1 / 3, 2 / 3, 2)):
        memory = list[float]()
        given = flags if attempt == 0 else [*flags, "--resume", "auto"]
        status = watch([*command, *given], until, folder / "log.txt", memory)
        quarters = [f"{part.max():,.0f}" for part in np.array_split(memory, 4) if len(part)]
        end = "killed" if status is None else f"ended with {status}"
        print(f"attempt {attempt + 1}, {end}: MiB of the largest process {quarters}", flush=True)
    if status:
        print((folder / "log.txt").read_text(encoding="utf-8")[-3000:])
        raise SystemExit(status)
    seen: dict[tuple[int, int, int, int], list[int]] = {}
    for path in samples.glob("*-rank-*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.endswith("]"):
                epoch, update, part, numbers = json.loads(line)
                key = epoch, update, part, int(path.stem.rpartition("-")[2])
                assert seen.setdefault(key, numbers) == numbers, key
    found = [sample for numbers in seen.values() for sample in numbers]
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    print(f"{len(found):,} samples, {len({*found}):,} of them different, of {max(found) + 1:,}")
    print(f"{summary['perf/samples_per_second']:,.0f} samples/s; {time.monotonic() - began:.0f} s")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
