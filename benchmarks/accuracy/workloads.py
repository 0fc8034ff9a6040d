"""The data sets, their goals, and their contestants: recipes, and peers with documented settings.

The settings of a peer are those of the file that its `source` names. The loops are our own; see
`benchmarks/peer_loops`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.accuracy.goals import Goal
from benchmarks.peer_loops.image_training import ImageSettings
from benchmarks.peer_loops.text_training import TextSettings

# Updates of a trial, which measures the rates of a contestant that would take hours.
TRIAL_UPDATES = 24
TRIAL_SKIPPED = 4  # the first of these, before the clock starts
Scaling = tuple[list[float], list[float]]  # the mean and deviation of each channel


@dataclass(frozen=True)
class Recipe:
    """A recipe with its default flags, or with others."""

    name: str  # for tables
    recipe: str  # the file's name in recipes/
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Published:
    """The published figures of a peer that is too slow to be repeated here."""

    epochs: float
    figures: Mapping[str, float]  # after these epochs, as shares
    source: str


@dataclass(frozen=True)
class SameEpochs:
    """The epochs of another contestant, which differs only in its speed."""

    contestant: str


@dataclass(frozen=True)
class Peer:
    """A peer with the settings that its documentation gives."""

    name: str  # for tables
    settings: ImageSettings | TextSettings
    source: str  # repository and path, and what differs
    # Where the epochs come from, if only the speed is measured here. None: it trains to its end.
    epochs_from: Published | SameEpochs | None = None


@dataclass(frozen=True)
class OnlyPublished:
    """A published result that can't be measured here.

    Its operations are published, or computed from published figures.
    """

    name: str
    goal: str  # its title
    petaflop: float
    source: str


@dataclass(frozen=True)
class Workload:
    """A data set with its goals and contestants."""

    name: str  # of the data set's folder
    data_type: Literal["images", "text"]
    evaluated: Literal["validation", "test"]  # the split, after each epoch, the same for both sides
    goals: tuple[Goal, ...]
    recipes: tuple[Recipe, ...]
    peers: tuple[Peer, ...]
    scaling: Scaling | None = None  # of the peers' pixels; None: that of the data
    only_published: tuple[OnlyPublished, ...] = ()

    @property
    def contestants(self) -> tuple[Recipe | Peer, ...]:
        """The recipes, then the peers."""
        return (*self.recipes, *self.peers)

    def contestant(self, name: str) -> Recipe | Peer:
        """Return the contestant of this name."""
        return next(entry for entry in self.contestants if entry.name == name)


# ------------------------------------------------------------------------------------ MNIST

# Keras documents an MLP of the recipe's size: 98.40 % after 20 epochs.
TEXTBOOK_MLP = ImageSettings(
    framework="pytorch",
    model="mlp",
    optimizer="rmsprop",
    learning_rate=1e-3,
    epochs=20,
    batch_size=128,
    evaluation_batch_size=128,
)
MLP_SOURCE = "keras-team/keras, examples/mnist_mlp.py (98.40 % after 20 epochs)"
EXAMPLE_CNN = ImageSettings(
    framework="pytorch",
    model="cnn",
    optimizer="adadelta",
    learning_rate=1.0,
    epochs=14,
    batch_size=64,
    evaluation_batch_size=1000,
    schedule="step",
    gamma=0.7,
)
MNIST_PEERS = (
    Peer("PyTorch, MLP fp32", TEXTBOOK_MLP, f"settings of {MLP_SOURCE}, in a PyTorch loop"),
    Peer(
        "Accelerate, MLP bf16",
        replace(TEXTBOOK_MLP, framework="accelerate", precision="bf16"),
        f"the loop of huggingface/accelerate, examples/cv_example.py; settings of {MLP_SOURCE}",
    ),
    Peer(
        "PyTorch example, CNN fp32",
        EXAMPLE_CNN,
        "pytorch/examples, mnist/main.py: a convolutional network, and no MLP; samples shuffled",
    ),
)
MNIST = Workload(
    name="mnist",
    data_type="images",
    evaluated="test",
    goals=(
        Goal("MNIST 98 %", {"accuracy": 0.98}),
        Goal("MNIST 98.8 %", {"accuracy": 0.988}),
    ),
    recipes=(Recipe("recipe mnist_mlp", "mnist_mlp"),),
    peers=MNIST_PEERS,
    scaling=([0.1307], [0.3081]),
)

# --------------------------------------------------------------------------------- CIFAR-10

RESNET18 = ImageSettings(
    framework="pytorch",
    model="resnet18",
    optimizer="sgd",
    learning_rate=0.1,
    epochs=200,
    batch_size=128,
    evaluation_batch_size=100,
    momentum=0.9,
    weight_decay=5e-4,
    schedule="cosine",
    crop_padding=4,
    flip=True,
)
RESNET18_SOURCE = "kuangliu/pytorch-cifar, main.py with ResNet18, without loader processes"
RESNET18_PUBLISHED = Published(
    epochs=200,
    figures={"accuracy": 0.9543},
    source="afzalxo/ResNet-Simplified-Pytorch, README.md: the same settings",
)
# Its schedule and loss don't matter here: only the speed of the network and batches is measured.
RESNET9 = ImageSettings(
    framework="pytorch",
    model="resnet9",
    optimizer="sgd",
    learning_rate=2e-3,
    epochs=10,
    batch_size=512,
    evaluation_batch_size=512,
    momentum=0.9,
    crop_padding=4,
    flip=True,
)
RESNET9_SOURCE = "99991/cifar10-fast-simple, train.py and model.py, which take fp32 on a CPU"
RESNET9_PUBLISHED = Published(
    epochs=10,
    figures={"accuracy_tta": 0.941},
    source="99991/cifar10-fast-simple, README.md: mean of 100 runs",
)
WITH_VIEWS = "CIFAR-10 94 %, with TTA"
CIFAR10 = Workload(
    name="cifar10",
    data_type="images",
    evaluated="test",
    goals=(
        Goal(WITH_VIEWS, {"accuracy": 0.94}, allows_views=True),
        Goal("CIFAR-10 94 %, without", {"accuracy": 0.94}),
    ),
    recipes=(
        Recipe("recipe cifar10_fast", "cifar10_fast"),
        Recipe("the same, 16 epochs", "cifar10_fast", ("--epochs", "16")),
    ),
    peers=(
        Peer("PyTorch, ResNet-18 fp32", RESNET18, RESNET18_SOURCE, RESNET18_PUBLISHED),
        Peer(
            "Accelerate, ResNet-18 bf16",
            replace(RESNET18, framework="accelerate", precision="bf16"),
            f"the loop of huggingface/accelerate, examples/cv_example.py; {RESNET18_SOURCE}",
            RESNET18_PUBLISHED,
        ),
        Peer("PyTorch, ResNet-9 fp32", RESNET9, RESNET9_SOURCE, RESNET9_PUBLISHED),
    ),
    scaling=([0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010]),
    only_published=(
        OnlyPublished(
            "airbench94, Muon, on an A100",
            WITH_VIEWS,
            0.29,
            "KellerJordan/cifar10-airbench, README.md: 94.05 %; its code needs CUDA",
        ),
    ),
)

# ------------------------------------------------------------------------------------- GLUE

RUN_GLUE = TextSettings(
    framework="trainer",
    learning_rate=2e-5,
    epochs=3,
    batch_size=32,
    evaluation_batch_size=8,
    max_length=128,
    is_padded=True,
)
FAST_RUN_GLUE = replace(RUN_GLUE, is_padded=False, precision="bf16")
RUN_GLUE_SOURCE = (
    "huggingface/transformers, examples/pytorch/text-classification/run_glue.py and README.md"
)
NLP_EXAMPLE = TextSettings(
    framework="accelerate",
    learning_rate=2e-5,
    epochs=3,
    batch_size=16,
    evaluation_batch_size=32,
    warmup_steps=100,
)
FAST_TRAINER = "HF Trainer, dynamic, bf16"


def trainer_peers(epochs: int) -> tuple[Peer, Peer]:
    """Return HF Trainer with run_glue's two flags for speed, and with its defaults."""
    fast = replace(FAST_RUN_GLUE, epochs=epochs)
    padded = replace(RUN_GLUE, epochs=epochs)
    return (
        Peer(FAST_TRAINER, fast, f"{RUN_GLUE_SOURCE}; --pad_to_max_length False --bf16"),
        Peer("HF Trainer, padded, fp32", padded, RUN_GLUE_SOURCE, SameEpochs(FAST_TRAINER)),
    )


SST2 = Workload(
    name="sst2",
    data_type="text",
    evaluated="validation",
    goals=(
        Goal("SST-2 88 %", {"accuracy": 0.88}),
        Goal("SST-2 91 %", {"accuracy": 0.91}),
    ),
    recipes=(Recipe("recipe bert", "bert"),),
    peers=trainer_peers(epochs=3),
)
MRPC = Workload(
    name="mrpc",
    data_type="text",
    evaluated="test",
    goals=(Goal("MRPC 80 %, F1 86 %", {"accuracy": 0.80, "f1": 0.86}),),
    recipes=(Recipe("recipe bert", "bert"),),
    peers=(
        Peer(
            "Accelerate, fp32",
            NLP_EXAMPLE,
            "huggingface/accelerate, examples/nlp_example.py; its data set, another checkpoint",
        ),
        *trainer_peers(epochs=5),  # README.md: MRPC is tiny, and 5 epochs were used
    ),
)

# ---------------------------------------------------------------------------- To try it out

DIGITS = Workload(
    name="digits",
    data_type="images",
    evaluated="test",
    goals=(Goal("digits 95 %", {"accuracy": 0.95}),),
    recipes=(Recipe("recipe mnist_mlp", "mnist_mlp"),),
    peers=MNIST_PEERS,
)

WORKLOADS = {workload.name: workload for workload in (MNIST, CIFAR10, SST2, MRPC, DIGITS)}
