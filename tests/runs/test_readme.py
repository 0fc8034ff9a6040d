"""Each command in the README and under docs/ runs, and each link there leads somewhere."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from textwrap import indent

import pytest
from packaging.requirements import Requirement
from PIL import Image as PillowImage

from benchmarks.harness.ports import free_port
from benchmarks.table import markdown
from common.config import parse_config
from common.data.sources import BUILT_IN
from common.tools.prove.command import read_command_line as read_proof
from common.tools.recipe import load_recipe
from common.tools.reproduce.command import read_command_line as read_reproduction
from common.tools.tune.command import read_command_line
from common.tools.tune.space import parse_space
from common.tools.vary.command import read_command_line as read_variants
from common.training.precision import cpu_has_bf16
from tests.examples import EXAMPLES
from tests.launch import CONFIGS, RECIPES, REPOSITORY, Runner, clean_environment, run_command
from tests.local_data import grey_images, write_odd_text, write_parquet
from tests.thin_resnet import write_thin_resnet

README = REPOSITORY / "README.md"
TEXT = README.read_text() if README.exists() else ""
BENCHMARKS = sorted((REPOSITORY / "benchmarks").glob("*.md"))
SPEEDS = (REPOSITORY / "benchmarks" / "README.md").read_text()
OTHER_RATIOS = (REPOSITORY / "benchmarks" / "peers.md").read_text()
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = sorted((REPOSITORY / "docs").glob("*.md"))
BLOCKS = [block for page in (README, *PAGES) for block in BLOCK.findall(page.read_text())]
SHELL = [block for language, block in BLOCKS if language in ("bash", "sh", "console")]
SHELL += [block for _, block in BLOCK.findall(SPEEDS) if "/peers.py" in block]
PYTHON = [block for language, block in BLOCKS if language == "python"]
LINES = [
    line
    for block in SHELL
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip() and not line.startswith("#")
]

TOOLS = (
    "recipes vary ",
    "recipes tune ",
    "recipes compare ",
    "recipes predict ",
    "recipes prove ",
    "recipes reproduce ",
    "peers.py",
)
# Proves a recipe with the check that launches the fewest runs, and with the fewest updates.
QUICK_PROOF = ("--checks", "figures", "--updates", "8")

# The separators between the commands of a line.
SEPARATOR = re.compile(r"(\s*(?:&&|\|\||;|\|)\s*)")
TRAINING = ("accelerate", "torchrun")
# How a line launches a script: the launcher with its own flags.
LAUNCH = re.compile(r"((?:accelerate launch|torchrun|python(?! -m)).*) ?\b\S+\.py")
EXECUTED = {"echo", "cp", "mkdir", "cd", "do", "done", "grep", "break", "export"}
# Not run here: they install, upload, show, or need a cluster; these lines' files are looked at.
LOOKED_AT = {"pip", "pytest", "git", "wandb", "tensorboard", "trackio", "sbatch", "hf", "ruff"}
LOOKED_AT |= {"mypy", "make"}

pytestmark = pytest.mark.skipif(not README.exists(), reason="there is no README.md yet")


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the repository and receives the files that commands write.

    Its ResNet has fewer channels, because most of the commands launch that recipe.
    """
    folder = tmp_path_factory.mktemp("readme")
    for name in ("accelerate_configs", "common", "benchmarks", "pyproject.toml"):
        if (REPOSITORY / name).exists():
            (folder / name).symlink_to(REPOSITORY / name)
    write_thin_resnet(folder / "recipes")
    for recipe in (REPOSITORY / "recipes").glob("*.py"):
        if not (folder / "recipes" / recipe.name).exists():
            (folder / "recipes" / recipe.name).symlink_to(recipe)
    (folder / "path" / "to").mkdir(parents=True)
    for name in ("image", "another"):
        PillowImage.new("L", (9, 9), 99).save(folder / "path" / "to" / f"{name}.png")
    return folder


def recipe_of(words: list[str]) -> tuple[str, list[str]] | None:
    """Return the recipe that a command launches and its flags, if it launches one."""
    for position, word in enumerate(words):
        if word.endswith(".py"):
            stem = Path(word).stem
            known = stem if (REPOSITORY / "recipes" / f"{stem}.py").exists() else "resnet"
            return known, words[position + 1 :]
    return None


def small(words: list[str], workspace: Path) -> list[str]:
    """Return a command that launches a recipe, made tiny, without the Hub and without GPUs."""
    launched = recipe_of(words)
    assert launched is not None, f"launches no script: {shlex.join(words)}"
    recipe, flags = launched
    head = words[: len(words) - len(flags)]
    if head[:2] == ["accelerate", "launch"] and any("multi" in word for word in head):
        head[2:2] = ["--main_process_port", str(free_port())]
    if head[0] == "torchrun":
        head[1:1] = ["--master-port", str(free_port())]
    if "--help" in flags:
        return [*head, *flags]
    data = small_data(workspace, recipe)
    if "--model" in flags and recipe == "bert":
        flags[flags.index("--model") + 1] = "scratch"
    if "--dataset" in flags:
        position = flags.index("--dataset") + 1
        if flags[position].startswith(("path/", "./", "/")):
            flags[position] = str(local_folder(workspace, flags))
        elif flags[position] not in BUILT_IN:
            flags[position] = data
    elif not {"--resume", "--config", "--evaluate-only"} & set(flags):
        flags += ["--dataset", data]
    return [*head, *flags, *missing_flags(flags)]


def small_data(workspace: Path, recipe: str) -> str:
    """Return the data set for a recipe whose own is too large, or is not in this repository."""
    if recipe != "bert":
        return "digits"
    # The built-in docstrings take seconds to find, and as long to evaluate.
    folder = workspace / "path" / "to" / "texts"
    if not folder.exists():
        write_odd_text(folder)
    return str(folder)


def missing_flags(flags: list[str]) -> Iterator[str]:
    """Yield the flags that make a run tiny, except those that the command already has."""
    if "--evaluate-only" in flags:
        yield from ("--tracker", "none")
        return
    if "--resume" in flags:
        yield from ("--target", "0")  # see `leave_unfinished`
    if "--profile" in flags and "--max-steps" in flags:
        yield from ("--max-steps", "14")  # enough for a profile, and far fewer than the default
    tiny = {"--max-steps": "2", "--epochs": "1", "--tracker": "none", "--log-every": "1"}
    for flag, value in (tiny | {"--batch-size": "16"}).items():
        if flag not in flags and not (flag == "--batch-size" and "--resume" in flags):
            yield from (flag, value)


def local_folder(workspace: Path, flags: list[str]) -> Path:
    """Make the folder of images that the README assumes, with its column of labels."""
    from datasets import ClassLabel, Features, Image

    label = flags[flags.index("--label-column") + 1] if "--label-column" in flags else "label"
    columns = grey_images(60, 0)
    columns[label] = columns.pop("label")
    features = Features({"image": Image(), label: ClassLabel(names=["a", "b", "c"])})
    folder = workspace / "path" / "to" / "folder"
    write_parquet(folder / "train.parquet", columns, features)
    return folder


# Stands in for the script, which an environment has only if it was installed since the last change
# of the entry points. `test_installed_script_is_this_command` compares the two.
RECIPES_COMMAND = 'recipes() { python -m common.tools "$@"; }'


def shell(command: str, workspace: Path, runner: Runner) -> str:
    """Run a line of the README as a shell does; return what it printed."""
    environment = clean_environment(runner.folder) | {"WANDB_DIR": str(workspace / "tracked")}
    # `python`, `accelerate` and `torchrun` are real, but for the seconds of their imports.
    folders = (runner.python.parent, Path(sys.executable).parent)
    environment["PATH"] = f"{folders[0]}:{folders[1]}:{environment['PATH']}"
    if "resnet.py --compile" in command:
        # It takes a minute; `test_equivalence` compiles an MLP and BERT for real.
        environment["TORCH_COMPILE_DISABLE"] = "1"
    words = ["bash", "-c", f"{RECIPES_COMMAND}\n{command}"]
    status, output, errors = run_command(words, environment, workspace, 300, one_core=True)
    assert status == 0, f"{command}\nended with {status}\n{output[-3000:]}\n{errors[-5000:]}"
    return output


def run_recipe(words: list[str], workspace: Path, runner: Runner) -> int:
    """Run the recipe that a command launches, on one process; return the status."""
    environment = clean_environment(runner.folder) | {"WANDB_DIR": str(workspace / "tracked")}
    (place,) = [place for place, word in enumerate(words) if word.startswith("recipes/")]
    words = [str(workspace / words[place]), *words[place + 1 :]]
    with (workspace / "output.txt").open("w") as output:
        process = runner.start(words, "fork", environment, workspace, output, output)
        return process.wait(300)


def leave_unfinished(name: str, recipe: str, workspace: Path, runner: Runner) -> None:
    """Make the run that a command of the README resumes: one that missed its target."""
    flags = missing_flags(["--target", "1", "--batch-size", "16"])
    data = small_data(workspace, recipe)
    words = [f"recipes/{recipe}.py", "--dataset", data, "--output-dir", f"runs/{name}"]
    words += ["--batch-size", "16", "--target", "1", *flags]
    run_recipe(words, workspace, runner)
    assert (workspace / "runs" / name / "checkpoints").is_dir()


def prepare(line: str, workspace: Path, runner: Runner) -> None:
    """Make the runs and the copy of a recipe that earlier lines would have left."""
    if "recipes prove train.py" in line and not (workspace / "train.py").exists():
        shutil.copy(REPOSITORY / "recipes" / "mnist_mlp.py", workspace / "train.py")
    published = re.search(r"reproduce (results/\w+)", line)
    if published and not (workspace / published[1]).exists():
        (publishing,) = [other for other in LINES if f"--publish {published[1]}" in other]
        prepare(publishing, workspace, runner)
        shell(rewritten(publishing, workspace), workspace, runner)
    for name in re.findall(r"\bruns/([\w-]+)", line):
        if makes(line, name) and "--resume" not in line:  # an earlier line may have needed it
            shutil.rmtree(workspace / "runs" / name, ignore_errors=True)
        if (workspace / "runs" / name).exists() or makes(line, name):
            continue
        makers = [other for other in LINES if makes(other, name)]
        if f"--resume runs/{name}" in line:
            launched = recipe_of(shlex.split(line))
            assert launched is not None
            leave_unfinished(name, launched[0], workspace, runner)
        else:
            assert makers, f"no line of the README makes runs/{name}"
            if makers[0].startswith("recipes tune "):
                shell(rewritten(makers[0], workspace), workspace, runner)
            else:
                words = shlex.split(rewritten(makers[0], workspace))
                status = run_recipe(words, workspace, runner)
                assert status == 0, (workspace / "output.txt").read_text()


def makes(line: str, name: str) -> bool:
    """Whether a line makes the run, or begins the search, in runs/`name`."""
    begins = f"--study runs/{name}" in line and ".py" in line
    return begins or f"--output-dir runs/{name}" in line


def small_search(words: list[str]) -> list[str]:
    """Return a command that searches, with tiny trials: three at most, one where it begins."""
    begins = any(word.endswith(".py") for word in words)
    if "--trials" in words:
        position = words.index("--trials")
        del words[position : position + 2]
    tiny = {"--max-steps": 2, "--eval-every": 1, "--tracker": "none", "--dataset": "digits"}
    flags = [f"{word}" for pair in tiny.items() for word in pair] if begins else []
    return [*words, *flags, "--trials", "1" if begins else "2"]


def two_variants(words: list[str]) -> list[str]:
    """Return a command that runs variants with one value of each flag but the first."""
    lists = [place for place, word in enumerate(words) if "," in word]
    return [
        word.partition(",")[0] if place in lists[1:] else word for place, word in enumerate(words)
    ]


def small_variants(words: list[str]) -> list[str]:
    """Return a command that runs variants, with tiny runs of few variants."""
    tiny = ["--seeds", "1", "--max-steps", "2", "--tracker", "none", "--dataset", "digits"]
    tiny += [] if "--batch-size" in words else ["--batch-size", "16"]
    return [*two_variants(words), *tiny]


def small_proof(words: list[str]) -> list[str]:
    """Return a command that proves a recipe quickly, on built-in data."""
    data = words.index("--dataset") + 1
    return [*words[:data], "digits", *words[data + 1 :], *QUICK_PROOF]


def small_peers(words: list[str]) -> list[str]:
    """Return a command that compares a few updates with those of peers."""
    tiny = ("--suites", "loop", "--rounds", "1", "--scale", "0.01", "--output", "peers.json")
    return [*words[:2], *tiny]


def looked_at(words: list[str]) -> list[str]:
    """Check that the files of a command exist, which is not run; return a command in its place."""
    for word in words:
        assert not word.endswith((".yaml", ".txt", ".sh")) or (REPOSITORY / word).is_file()
    return ["true"]


def parsed_only(words: list[str]) -> list[str]:
    """Check that the scripts of a command parse; return a command in its place."""
    scripts = [word for word in words if word.endswith(".py")]
    assert scripts, f"teach this test about: {shlex.join(words)}"
    for script in scripts:
        ast.parse((REPOSITORY / script).read_text())
    return ["true"]


def small_reproduction(words: list[str]) -> list[str]:
    """Return a command that reproduces a tiny run, which was trained on built-in data."""
    return ["digits" if word == "path/to/data" else word for word in words]


SMALL_TOOLS = {
    "vary": small_variants,
    "tune": small_search,
    "prove": small_proof,
    "reproduce": small_reproduction,
}
# These are quick on the tiny runs of other commands.
QUICK_TOOLS = ("compare", "workspace", "predict")


def tiny_command(words: list[str], workspace: Path) -> list[str] | None:
    """Return a command made tiny, `true` for one that is not run, or None for one of the shell."""
    if words[0] == "recipes" and words[1] in SMALL_TOOLS:
        return SMALL_TOOLS[words[1]](words)
    if words[0] == "recipes" and words[1] in QUICK_TOOLS:
        return words
    if words[0] in TRAINING or is_python_launch(words):
        return small(words, workspace)
    if words[0] in LOOKED_AT:
        return looked_at(words)
    if words[1:2] == ["benchmarks/peers.py"]:
        return small_peers(words)
    if words[0] == "python":
        return parsed_only(words)
    assert words[0] in EXECUTED, f"teach this test about: {shlex.join(words)}"
    return None


def rewritten(line: str, workspace: Path) -> str:
    """Return a line with each of its commands made tiny, or left out where it only installs."""
    if not cpu_has_bf16():  # which emulates it, at a hundredth of the speed
        line = re.sub(r"(--mixed-precision \S*)bf16", r"\1auto", line)
    parts = SEPARATOR.split(line)
    for position in range(0, len(parts), 2):
        command = parts[position].strip()
        keyword = re.match(r"(until|while|if|do|then|!)\s+", command)
        prefix = keyword.group(0) if keyword else ""
        words = shlex.split(command.removeprefix(prefix))
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            prefix += words.pop(0) + " "
        tiny = tiny_command(words, workspace) if words else None
        if tiny is not None:
            parts[position] = prefix + shlex.join(tiny)
    return "".join(parts)


def is_python_launch(words: list[str]) -> bool:
    """Whether a command runs a recipe, or a copy of one, by plain Python."""
    return words[0] == "python" and any("recipes/" in word or word == "train.py" for word in words)


def needs_gpu(line: str) -> bool:
    """Whether a line launches on GPUs, or on other machines."""
    launcher = line.split("recipes/")[0]
    return ("gpu" in launcher or "multi_node" in launcher) and not line.startswith("sbatch")


def marked_lines() -> Iterator[object]:
    """Yield the lines to run; those that launch a recipe or a copy, or start a tool, are slow."""
    for line in LINES:
        if needs_gpu(line):
            continue
        script = r"(\brecipes/\S+|\btrain)\.py"
        launches = re.search(rf"(accelerate launch|torchrun|python\b).*{script}", line)
        is_slow = launches is not None or any(word in line for word in TOOLS)
        marks = [pytest.mark.slow] if is_slow else []
        if "benchmarks/peers.py" in line:  # as long as ten other commands
            marks = [pytest.mark.exhaustive]
        yield pytest.param(line, marks=marks, id=line[:60])


@pytest.mark.parametrize("line", list(marked_lines()))
def test_command_runs(line: str, workspace: Path, runner: Runner) -> None:
    """A command of the README runs as written, except for fewer steps, channels and local data."""
    prepare(line, workspace, runner)
    before = set((workspace / "runs").glob("*"))
    command = rewritten(line, workspace)
    output = shell(command, workspace, runner)
    is_tool = line.startswith("recipes ") or {"--help", "sbatch"} & set(line.split())
    if ("recipes/" in line or "train.py" in line) and not is_tool:
        assert "accuracy" in output or "is finished" in output, output
        for directory in set((workspace / "runs").glob("*")) - before:
            assert '"finished"' in (directory / "status.json").read_text(), directory
    shown = {"--help": "--learning-rate", "recipes compare ": "(baseline)"}
    shown |= {"recipes tune ": "best: trial-", "recipes workspace ": "train/loss"}
    shown |= {"recipes vary ": "with picture.png beside it"}
    reproduced = "published in " if "--publish" in line else "equal bits in "
    shown |= {"recipes prove ": "1 of 1 checks passed", "recipes reproduce ": reproduced}
    predicted = '"p95_milliseconds": ' if "--benchmark" in line else '"label": "'
    shown |= {"peers.py": "written: peers.json", "recipes predict ": predicted}
    for word, expected_output in shown.items():
        assert word not in line or expected_output in output, output


@pytest.mark.parametrize("line", [line for line in LINES if needs_gpu(line)])
def test_gpu_command_is_well_formed(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command for GPUs names an existing launch config and flags of the recipe."""
    words = shlex.split(line)
    assert (REPOSITORY / words[words.index("--config_file") + 1]).parent == CONFIGS
    assert (REPOSITORY / words[words.index("--config_file") + 1]).is_file()
    launched = recipe_of(words)
    assert launched is not None
    assert_flags_exist(*launched, monkeypatch)


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("sbatch")])
def test_slurm_command_is_well_formed(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command for a cluster names an existing script and flags of the recipe."""
    words = shlex.split(line)
    script = next(word for word in words if word.endswith(".sh"))
    assert (REPOSITORY / script).is_file()
    launched = recipe_of(words)
    assert launched is not None
    assert_flags_exist(*launched, monkeypatch)


def assert_flags_exist(recipe: str, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a recipe takes these flags."""
    monkeypatch.setattr(sys, "argv", [f"{recipe}.py", *flags])
    parse_config(import_module(f"recipes.{recipe}").Config)


@pytest.mark.parametrize("line", LINES)
def test_flags_are_taken_as_written(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flag in the README is valid as written, also where the test above changes it."""
    for command in SEPARATOR.split(line)[::2]:
        words = shlex.split(command)
        if words[:2] == ["recipes", "vary"]:
            variants, flags = read_variants(words[2:])
            recipe = load_recipe(REPOSITORY / variants.recipe)
            assert parse_space(flags, recipe, least_searched=0)[0] or variants.num_processes != "1"
            continue
        if words[:2] == ["recipes", "tune"] and "recipes/" in command:
            settings = read_command_line(words[2:])[1]
            recipe = REPOSITORY / settings.recipe
            assert parse_space(settings.flags, load_recipe(recipe))[0]
            continue
        if words[:2] == ["recipes", "prove"]:
            flags = read_proof(words[2:])[1]
            assert_flags_exist("mnist_mlp", flags, monkeypatch)
            continue
        if words[:2] == ["recipes", "reproduce"]:
            flags = read_reproduction(words[2:])[1]
            assert_flags_exist("mnist_mlp", flags, monkeypatch)
            continue
        launched = recipe_of(words) if {"launch", "torchrun", "python"} & set(words) else None
        if launched is None or not Path(words[-len(launched[1]) - 1]).match("recipes/*.py"):
            continue
        stateful = {"--help", "--resume", "--config"} & set(launched[1])
        if not stateful:
            assert_flags_exist(*launched, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("block", PYTHON)
def test_python_runs(block: str, workspace: Path, runner: Runner) -> None:
    """A Python snippet runs, on a run that a command of the README makes."""
    prepare(block, workspace, runner)
    (workspace / "snippet.py").write_text(block)
    assert len(block.splitlines()) <= 12
    assert shell("python snippet.py", workspace, runner).strip()


def test_two_commands_install_run_and_test() -> None:
    """The README has the two commands of a fresh machine; its flags for tests are explained."""
    assert "pip install -r requirements.txt && python recipes/mnist_mlp.py" in LINES
    assert "pip install -r requirements-dev.txt && pytest" in LINES
    assert 'pytest -m ""' in TEXT
    script = (REPOSITORY / ".ci" / "run").read_text()
    assert 'pytest -m "not exhaustive"' in script
    tests_page = (REPOSITORY / "tests" / "README.md").read_text()
    for command in ('pytest -m "not exhaustive"', 'pytest -m ""'):
        assert command in tests_page


def test_requirements_are_pinned_within_the_ranges() -> None:
    """`requirements.txt` pins versions that `pyproject.toml` allows and ends with the package."""
    lines = [
        line.split("#")[0].strip()
        for line in (REPOSITORY / "requirements.txt").read_text().splitlines()
    ]
    lines = [line for line in lines if line]
    assert lines[-1] == "-e ."
    pinned = {r.name: r for r in map(Requirement, lines[:-1])}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    ranges = {r.name: r for r in map(Requirement, project["dependencies"])}
    assert pinned.keys() == ranges.keys()
    for name, requirement in pinned.items():
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", name
        assert ranges[name].specifier.contains(specifier.version), name
    development = (REPOSITORY / "requirements-dev.txt").read_text().splitlines()
    assert development[0] == "-r requirements.txt"
    for line in development[1:]:
        if line and not line.startswith("#"):
            Requirement(line)


def test_links_lead_somewhere() -> None:
    """Each file that the README, a page under docs/ or one about the benchmarks links to exists."""
    for page in (README, *PAGES, *BENCHMARKS):
        links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", page.read_text())
        for link in links:
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_to_headings_of_the_benchmarks_lead_somewhere() -> None:
    """A link to a section of a page about the benchmarks names a heading of that page."""
    for page in (README, *PAGES, *BENCHMARKS):
        for file, anchor in re.findall(r"\]\(([^):#]*)#([^)]+)\)", page.read_text()):
            target = (page.parent / file).resolve() if file else page
            if target in BENCHMARKS:
                assert anchor in anchors(target), f"{page.name}: {file}#{anchor}"


def test_no_figure_is_left_open() -> None:
    """No placeholder stands where a measured figure belongs."""
    assert not re.findall(r"@[A-Z0-9]+@|TODO|TBD|XXX", TEXT)


def test_benchmark_tables_are_what_was_measured() -> None:
    """The pages about the benchmarks have the tables of all results; the README has some ratios."""
    tables = ""
    for file in (REPOSITORY / "benchmarks" / "results").glob("peers-*.json"):
        rates, other_ratios = markdown(json.loads(file.read_text())).split("\n\n")
        assert rates in SPEEDS
        assert other_ratios in OTHER_RATIOS
        tables += f"{rates}\n{other_ratios}\n"
    (quoted,) = re.findall(r"relative to a peer .*?benchmarks/README", TEXT, re.DOTALL)
    ratios = re.findall(r"(\d\.\d) ×", quoted)
    measured = re.findall(r"\| (\d+\.\d+) \(", tables)
    assert len(ratios) > 4
    assert {*ratios} <= {f"{float(ratio):.1f}" for ratio in measured}


def test_loop_in_the_readme_is_that_of_the_recipes() -> None:
    """Readers see the loop that they will find; recipes differ only in the call of their loss."""
    (loop,) = [block for language, block in BLOCK.findall(TEXT) if language == "py"]
    call_of_loss = re.compile(r"compute_loss\(model, batch.*\)")
    for recipe in RECIPES:
        source = (REPOSITORY / "recipes" / f"{recipe}.py").read_text()
        assert indent(loop, " " * 8) in call_of_loss.sub("compute_loss(model, batch)", source)


DIFF = re.compile(r"examples/(\w+)\.py\).*?```diff\n(.*?)```", re.DOTALL)
DIFFS = [diff for page in (README, *PAGES) for diff in DIFF.findall(page.read_text())]


@pytest.mark.parametrize(("name", "block"), DIFFS)
def test_diffs_are_those_of_the_examples(name: str, block: str) -> None:
    """Each line that a diff removes or adds is one that the example really removed or added."""
    (example,) = [example for example in EXAMPLES if example.name == name]
    origin = (REPOSITORY / "recipes" / f"{example.origin}.py").read_text().splitlines()
    edited = example.path.read_text().splitlines()
    for line in block.splitlines():
        present, absent = (edited, origin) if line[0] == "+" else (origin, edited)
        assert line[1:] in present, line
        assert line[1:] not in absent, line
