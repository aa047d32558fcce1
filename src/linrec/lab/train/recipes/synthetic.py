"""Recipes of the generated tasks without their own: all share a small model and its training settings."""

from linrec.lab import tasks
from linrec.lab.tasks import DrawnTask
from linrec.lab.train.recipes.registry import recipe_names, register, small

for _name in tasks.names():
    if issubclass(tasks.get(_name), DrawnTask) and _name.replace("_", "-") not in recipe_names():
        register(_name, small(_name))
