"""Recipes: functions that return a complete training configuration, with the sources of its numbers.

A file holds a family of recipes; each recipe registers itself under its function's name.
"""

# in the order in which recipes are listed
from linrec.lab.train.recipes import memory_horizon, text, images, long_range_arena, series  # noqa: I001, F401
from linrec.lab import tasks
from linrec.lab.tasks import DrawnTask
from linrec.lab.train.recipes.registry import (
    get_recipe,
    recipe,
    recipe_names,
    recipe_summary,
    register,
    small,
)

__all__ = ["get_recipe", "recipe", "recipe_names", "recipe_summary"]

# generated tasks without a recipe of their own share a small model and its training settings
for _name in tasks.names():
    if issubclass(tasks.get(_name), DrawnTask) and _name.replace("_", "-") not in recipe_names():
        register(_name, small(_name))
