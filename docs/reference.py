"""Hooks of MkDocs: fill in the tables, and make the reference from the modules that there are.

Every package directly under `linrec` gets a page with what it exports, under the names that users import, and
with what its modules declare in `__all__`. The rest of it, which may change at any time, gets its own page.
A new file needs no change here. The build fails when something that is exported is missing from its page.
"""

import functools
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

HERE = Path(__file__).parent
PACKAGE = "linrec"
INSIDE = "Written for readers of the code. What is described here may change with every version."

# MkDocs loads this file by its path, so what lies beside it is not on the path of imports
sys.path.insert(0, str(HERE))

import tables  # noqa: E402


class Reference(NamedTuple):
    """A page: its title, its address, its text, and the objects that must be on it."""

    title: str
    uri: str
    text: str
    objects: tuple[str, ...]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages that are found to the navigation: results, and the reference."""
    assert config.nav is not None
    if results := sorted(path.relative_to(HERE).as_posix() for path in HERE.glob("results/*.md")):
        config.nav.append({"Results": results})
    public = [{page.title: page.uri} for page in _public_pages()]
    inside = [{page.title: page.uri} for page in _inside_pages()]
    config.nav += [{"Reference": public}, {"Inside": inside}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the reference."""
    for page in (*_public_pages(), *_inside_pages()):
        files.append(File.generated(config, page.uri, content=page.text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill the tables in."""
    return tables.filled(markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Check that nothing is missing."""
    for page in (*_public_pages(), *_inside_pages()):
        html = (Path(config.site_dir) / page.uri).with_suffix(".html").read_text()
        if missing := [name for name in page.objects if f'id="{name}"' not in html]:
            raise PluginError(f"{page.uri} lacks {', '.join(missing)}")


@functools.cache
def _loaded() -> griffe.Module:
    loaded = griffe.load(PACKAGE, search_paths=[HERE.parent / "src"])
    assert isinstance(loaded, griffe.Module)
    return loaded


@functools.cache
def _public_pages() -> tuple[Reference, ...]:
    pages = []
    # an object that one package defines and another exports, such as `linrec.mixers.Mixer`, has one place
    anywhere = {path for package in _packages(_loaded()) for path in _exported(package)}
    for package in _packages(_loaded()):
        exported = _exported(package)
        blocks = [_block(package.path, level=1)]
        blocks += [_block(path, heading=heading) for path, heading in exported.items()]
        objects = list(exported)
        for module in _modules(package):
            declared = [
                str(name)
                for name in module.exports or ()
                if f"{module.path}.{name}" not in anywhere and not module.members[str(name)].is_alias
            ]
            if declared and not module.is_init_module:
                blocks.append(_block(module.path))
                blocks += [_block(f"{module.path}.{name}", level=3, heading=name) for name in declared]
                objects += [f"{module.path}.{name}" for name in declared]
        uri = f"reference/{package.name}.md"
        pages.append(Reference(package.path, uri, "\n\n".join(blocks), tuple(objects)))
    return tuple(pages)


@functools.cache
def _inside_pages() -> tuple[Reference, ...]:
    pages = []
    for package in (_loaded(), *_packages(_loaded())):
        exported = _exported(package)
        blocks, objects = [f"# Inside {package.path}\n\n{INSIDE}"], []
        # the other packages have pages of their own
        for module in _modules(package) if package is not _loaded() else _files(package):
            own = [
                name
                for name, member in module.members.items()
                if not name.startswith("_")
                and not member.is_alias
                and (member.is_function or member.is_class)
                and member.path not in exported
            ]
            if own and module.exports is None:
                blocks.append(_block(module.path, members=own))
                objects += [f"{module.path}.{name}" for name in own]
        if objects:
            uri = f"inside/{package.name}.md"
            pages.append(Reference(package.path, uri, "\n\n".join(blocks), tuple(objects)))
    return tuple(pages)


def _packages(package: griffe.Module) -> list[griffe.Module]:
    return [module for _, module in sorted(package.modules.items()) if module.is_init_module]


def _files(package: griffe.Module) -> list[griffe.Module]:
    return [module for _, module in sorted(package.modules.items()) if not module.is_init_module]


def _modules(package: griffe.Module) -> Iterator[griffe.Module]:
    """Yield the package itself and all modules below it, those of packages inside it too."""
    yield package
    yield from _files(package)
    for inner in _packages(package):
        yield from _modules(inner)


def _exported(package: griffe.Module) -> dict[str, str]:
    """Return what a package and the packages inside it export: where it is defined, and what users import."""
    exported: dict[str, str] = {}
    imported = vars(importlib.import_module(package.path))
    for module in _modules(package):
        if module.is_init_module:
            for name in module.exports or ():
                member = module.members[str(name)]
                path = member.final_target.path if member.is_alias else member.path
                shortest = package if name in imported else module
                exported.setdefault(path, f"{shortest.path}.{name}")
    # constants last
    return dict(sorted(exported.items(), key=lambda item: item[1].rpartition(".")[2].isupper()))


def _block(path: str, *, level: int = 2, heading: str | None = None, members: list[str] | None = None) -> str:
    options = {
        "heading": heading or path,
        "toc_label": (heading or path).rpartition(".")[2],
        "heading_level": level,
        # a package shows its text alone; an object shows all that it has
        "members": members if members is not None or heading is not None else [],
    }
    lines = [f"      {name}: {json.dumps(value)}" for name, value in options.items()]
    return "\n".join([f"::: {path}", "    options:", *lines])
