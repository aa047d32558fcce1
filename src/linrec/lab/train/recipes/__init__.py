"""Recipes: functions that return a complete training configuration, with the sources of its numbers.

A file holds a family of recipes; each recipe registers itself under its function's name.
"""

# in the order in which recipes are listed
from linrec.lab.train.recipes import memory_horizon, text, images, long_range_arena  # noqa: I001, F401
from linrec.lab.train.recipes import series, dynamics, synthetic  # noqa: F401
from linrec.lab.train.recipes.registry import get_recipe, recipe, recipe_names, recipe_summary

__all__ = ["get_recipe", "recipe", "recipe_names", "recipe_summary"]
