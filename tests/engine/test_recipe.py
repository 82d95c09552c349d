"""Recipes: typed, complete, and refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_engine.errors import RecipeError
from dflash_engine.training.recipe import load_recipe, parse_recipe

MINIMAL = """
[drafter]
target_layer_ids = [1]
mask_token_id = 3
block_size = 4
layers = 1
[data]
files = ["a.jsonl"]
max_length = 64
[train]
steps = 10
rows = 1
anchors = 4
[loss]
gamma = 2.0
[optimizer]
learning_rate = 1e-3
"""


def test_what_a_recipe_leaves_out_has_its_default() -> None:
    recipe = parse_recipe(MINIMAL)
    assert (recipe.pipeline.ring_slots, recipe.loss.vocabulary, recipe.train.seed) == (4, "full", 0)


def test_overrides_are_toml_values() -> None:
    recipe = parse_recipe(MINIMAL, ["train.seed=7", 'loss.vocabulary="data"', "drafter.target_layer_ids=[0, 2]"])
    assert (recipe.train.seed, recipe.loss.vocabulary, recipe.drafter.target_layer_ids) == (7, "data", (0, 2))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("steps = 10", "step = 10"), "unknown key 'train.step'; did you mean 'steps'"),
        (("[loss]", "[los]"), "unknown key 'los'; did you mean 'loss'"),
        (("block_size = 4", ""), "'drafter.block_size' is missing"),
        (("steps = 10", 'steps = "10"'), "'train.steps' is '10', expected int"),
        (("steps = 10", "steps = true"), "'train.steps' is True, expected int"),
        (("steps = 10", "steps = 0"), "'train.steps' is 0, expected more than 0"),
        (("[1]", "[1.5]"), r"'drafter.target_layer_ids\[0\]' is 1.5, expected int"),
        (("[1]", "[]"), "target_layer_ids' is empty"),
        (("block_size = 4", "block_size = 1"), "expected at least 2"),
        (("gamma = 2.0", 'gamma = 2.0\nvocabulary = "some"'), "expected 'full' or 'data'"),
        (("[loss]", "[loss"), "not TOML"),
        (("[loss]", "[pipeline]\ndrafter_ranks = 3\n[loss]"), "trains with one drafter rank"),
    ],
)
def test_a_recipe_that_cannot_be_used_is_refused_by_name(change: tuple[str, str], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        parse_recipe(MINIMAL.replace(*change))


@pytest.mark.parametrize(
    ("override", "says"),
    [("steps=3", "expected table.key=value"), ("train.steps=x", "not a TOML value"), ("train.stepz=3", "stepz")],
)
def test_an_override_that_cannot_be_used_is_refused_by_name(override: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        parse_recipe(MINIMAL, [override])


def test_shipped_recipes_are_readable_and_their_data_is_there() -> None:
    folder = Path(__file__).resolve().parents[2] / "profiles" / "recipes"
    for path in folder.glob("*.toml"):
        for name in load_recipe(path).data.files:
            assert (path.parent / name).is_file()
