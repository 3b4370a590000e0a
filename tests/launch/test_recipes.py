"""Lines that NVIDIA has published, with small sizes: they start under our schedules, and losses are those of megatron-core's own.

With MEGATRON_LM, which names a checkout, its script trains them as well.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launch.launched import STAND_IN, launch, run
from launch.recipes import OF_THE_SCRIPT, RECIPES, UNDER_STOCK, shrunken
from launch.test_upstream import UPSTREAM, needs_upstream
from marked import rest

VOCABULARY = "--vocab-size 61"
ON_UPSTREAM = f"--tokenizer-type NullTokenizer --mock-data --num-workers 0 --eval-iters 0 --eval-interval 100 {VOCABULARY}"


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.left_out])
def test_all_that_does_not_go_with_a_schedule_is_refused_at_once(tmp_path: Path, name: str) -> None:
    recipe = RECIPES[name]
    flags = f"{shrunken(recipe, OF_THE_SCRIPT)} {VOCABULARY} --pipeline-schedule {recipe.schedule}"
    codes, output, _ = run(tmp_path, STAND_IN, flags, recipe.ranks, started=1)
    assert codes == [2], output
    [line] = [line for line in output.splitlines() if line.startswith("mpipe launch: ")]
    places = [line.index(f"{flag} ") for flag in recipe.left_out]
    assert places == sorted(places)
    assert line.endswith("; the same command with --adapt leaves them out, and says at what price")


@pytest.mark.parametrize("name", [rest(name) if recipe.ranks > 4 else name for name, recipe in RECIPES.items()])
def test_a_shrunken_recipe_trains_as_under_stock(tmp_path: Path, name: str) -> None:
    recipe = RECIPES[name]
    flags = f"{shrunken(recipe, OF_THE_SCRIPT)} {VOCABULARY} --pipeline-schedule {recipe.schedule} --adapt"
    stock = f"{shrunken(recipe, OF_THE_SCRIPT, UNDER_STOCK)} {VOCABULARY}"
    alone = launch(tmp_path / "stock", STAND_IN, stock, recipe.ranks)
    adapted = launch(tmp_path / "adapted", STAND_IN, flags, recipe.ranks)
    assert [loss for loss, _ in adapted] == [loss for loss, _ in alone] and len(alone) == 3
    said = [line for line in (tmp_path / "adapted" / "output").read_text().splitlines() if "left out by --adapt. Price: " in line]
    assert [line.startswith(f" {flag} ") for line, flag in zip(said, recipe.left_out, strict=True)] == [True] * len(said)


@needs_upstream
@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_shrunken_recipe_trains_as_under_stock_by_upstreams_own_script(tmp_path: Path, name: str) -> None:
    recipe = RECIPES[name]
    start = f"{ON_UPSTREAM} --dist-ckpt-optim-fully-reshardable --{{}} {tmp_path}/checkpoint"  # upstream draws weights by rank
    save, load = (start.format(verb) for verb in ("save", "load"))
    stock = shrunken(recipe, UNDER_STOCK)
    launch(tmp_path / "start", UPSTREAM, f"{stock} {save} --save-interval 1 --exit-interval 1", recipe.ranks, "--core pip")
    alone = launch(tmp_path / "stock", UPSTREAM, f"{stock} {load}", recipe.ranks, "--core pip")
    flags = f"{shrunken(recipe)} {load} --pipeline-schedule {recipe.schedule} --adapt"
    adapted = launch(tmp_path / "adapted", UPSTREAM, flags, recipe.ranks, "--core pip")
    assert [loss for loss, _ in adapted] == [loss for loss, _ in alone] and len(alone) == 2
