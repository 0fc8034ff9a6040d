"""`load_model`: the trained module of a recipe, a copy, or Transformers, or one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from common.checkpoints.export import save_model
from common.errors import UserError
from common.tools.predict import load_model
from common.tools.predict.loading import RecipeArgument, load_trained_model
from common.tools.predict.predictor import Predictor
from common.tools.recipe import load_recipe
from tests.examples import EXAMPLES
from tests.launch import REPOSITORY

CLASSIFIER = ("MLP", {"in_features": 4, "hidden_sizes": [3], "classes": 2, "dropout": 0.5})
# For each example that defines its model: the class, and arguments of a small model.
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "averaged": CLASSIFIER,
    "character_model": ("CharacterModel", {}),
    "contrastive": ("MLP", {"in_features": 4, "hidden_sizes": [3], "size": 2, "dropout": 0.5}),
    "denoiser": ("Denoiser", {"width": 4, "depth": 1}),
    "distilled": CLASSIFIER,
    "dqn": ("MLP", {"sizes": [2, 3, 2]}),
    "freezing": CLASSIFIER,
    "gan": ("MLP", {"sizes": [4, 3, 2], "is_normalized": True}),
    "multi_label": ("MLP", {"in_features": 4, "hidden_sizes": [3], "labels": 2, "dropout": 0.5}),
    "own_dataset": ("ConvNet", {"widths": [4], "classes": 2}),
    "regression": ("MLP", {"in_features": 4, "hidden_sizes": [3], "dropout": 0.5}),
    "tagging": ("Tagger", {"width": 4, "tags": 2}),
    "two_heads": CLASSIFIER,
}


def trained(folder: Path, file: Path, class_name: str, arguments: dict[str, Any]) -> nn.Module:
    """Write the model folder of a finished run of an example, and return the model."""
    model = getattr(load_recipe(file).module, class_name)(**arguments)
    facts = {"recipe": file.stem, "class": class_name, "arguments": arguments}
    save_model(folder / "model", model, facts, card="", skeleton=None)
    return model


@pytest.mark.parametrize("name", [name for name, (_, arguments) in SMALL.items() if arguments])
def test_model_of_an_example_is_loaded(name: str, tmp_path: Path) -> None:
    """From the run or its model folder, it has the same weights in fp32, in evaluation mode."""
    file = REPOSITORY / "examples" / f"{name}.py"
    model = trained(tmp_path / "run", file, *SMALL[name])
    for place in (tmp_path / "run", tmp_path / "run" / "model"):
        loaded = load_model(place, file)
        assert type(loaded).__name__ == SMALL[name][0]
        assert not any(module.training for module in loaded.modules())
        for key, value in model.state_dict().items():
            torch.testing.assert_close(loaded.state_dict()[key], value, rtol=0, atol=0)


@pytest.mark.parametrize("file_name", ["regression.py", "train.py"])
@pytest.mark.parametrize("resumed", [False, True])
def test_other_code_is_named(
    resumed: bool, file_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other code may fit the weights, and predict otherwise; a comment changes nothing."""
    file = REPOSITORY / "examples" / "regression.py"
    trained(tmp_path / "run", file, *SMALL["regression"])
    source = file.read_text()
    if resumed:  # the run was resumed with other code, which trained the model
        (tmp_path / "run" / "recipe.py").write_text("OBJECTIVE = 'loss:min'\n")
    name = "recipe-at-00000008.py" if resumed else "recipe.py"
    (tmp_path / "run" / name).write_text(source)
    recipe = tmp_path / file_name
    recipe.write_text(source + "# a comment\n")
    load_model(tmp_path / "run", recipe)
    assert capsys.readouterr().err == ""
    recipe.write_text(source.replace("nn.ReLU", "nn.Tanh"))
    load_model(tmp_path / "run", recipe)
    output = capsys.readouterr().err
    kept = tmp_path / "run" / name
    was_changed = f"{recipe} was changed after this model was trained" in output
    is_another = f"{recipe} has other code than regression.py, which trained this model" in output
    assert (was_changed, is_another) == (file_name == "regression.py", file_name == "train.py")
    assert f'pass recipe_file="{kept}"' in output
    load_trained_model(tmp_path / "run" / "model", RecipeArgument(recipe))
    assert f"pass --recipe {kept}\n" in capsys.readouterr().err


OWN_PREPARATION = """
import torch
from torch import nn
from common.config import TrainingConfig as Config

OBJECTIVE = "loss:min"


class Regressor(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("std", torch.ones(features))
        self.layer = nn.Linear(features, 1)

    def forward(self, rows):
        return self.layer((rows - self.mean) / self.std)
"""


@pytest.mark.parametrize("features", [1, 3, 8])
def test_buffers_bring_the_preparation_of_rows_along(features: int, tmp_path: Path) -> None:
    """The docs advise it: the loaded model takes rows as they are in the file."""
    recipe = tmp_path / "train.py"
    recipe.write_text(OWN_PREPARATION)
    rows = 5 + 3 * torch.randn(20, features)
    model: Any = load_recipe(recipe).module.Regressor(features)
    model.mean.copy_(rows.mean(0))
    model.std.copy_(rows.std(0))
    facts = {"recipe": "train", "class": "Regressor", "arguments": {"features": features}}
    save_model(tmp_path / "run" / "model", model, facts, card="", skeleton=None)
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path / "run", recipe)(rows), model(rows))


def test_every_example_with_its_own_model_is_tested() -> None:
    """Those of BERT are loaded by Transformers, in the tests of whole runs."""
    names = {example.name for example in EXAMPLES if example.origin != "bert"}
    assert names == SMALL.keys()


def test_message_of_predict_names_a_working_call(tmp_path: Path) -> None:
    """The test executes the call, and it loads the model."""
    file = REPOSITORY / "examples" / "regression.py"
    trained(tmp_path / "run", file, *SMALL["regression"])
    wording = r"from common\.tools\.predict import load_model"
    with pytest.raises(UserError, match=wording) as refused:
        Predictor(tmp_path / "run", recipe=file)
    call = refused.value.message.rpartition("model = ")[2].rstrip("`")
    assert isinstance(eval(call, {"load_model": load_model}), nn.Module)


def test_module_beside_a_recipe_is_found(tmp_path: Path) -> None:
    """The module is found as it is when the recipe is launched."""
    (tmp_path / "my_own_layers.py").write_text("from torch.nn import Linear as Own\n")
    text = "from common.config import TrainingConfig as Config\nfrom my_own_layers import Own\n"
    (tmp_path / "train.py").write_text(f"{text}OBJECTIVE = 'loss:min'\n")
    arguments = {"in_features": 2, "out_features": 1}
    trained(tmp_path / "run", tmp_path / "train.py", "Own", arguments)
    assert isinstance(load_model(tmp_path / "run", tmp_path / "train.py"), nn.Linear)


@pytest.mark.parametrize(
    ("changes", "file", "message"),
    [
        ({"arguments": None}, "copy", r'add "arguments": .* of MLP to this file, and'),
        (
            {"class": "Other"},
            "copy",
            "neither defines nor imports the model's class, Other: pass the",
        ),
        ({"arguments": {"size": 3}}, "copy", r"model\.json can't be read \(TypeError"),
        (
            {},
            None,
            "by the recipe regression, which is not one of the files in recipes/: pass the path "
            r'of that file, such as recipe_file="examples/lora\.py"$',
        ),
        ({}, "missing.py", r"there is no file missing\.py"),
    ],
)
def test_mistakes_are_sentences(
    changes: dict[str, Any], file: str | None, message: str, tmp_path: Path
) -> None:
    """One sentence says what is missing, and where it belongs."""
    copy = REPOSITORY / "examples" / "regression.py"
    trained(tmp_path / "run", copy, *SMALL["regression"])
    path = tmp_path / "run" / "model" / "model.json"
    facts = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: fact for name, fact in facts.items() if fact is not None}))
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "run", copy if file == "copy" else file)
