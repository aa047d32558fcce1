"""Hooks of MkDocs: fill in the tables, and make the reference from the modules that there are.

Every mixer and every memory across the stack gets a page. Every page in `docs/operators` says which functions
it is the reference of:

    <!-- reference: linrec.ops.scan.scan -->

Every package directly under `linrec` or `linrec.lab` gets a page with everything else that it exports, under
the names that users import. A module that declares other objects in `__all__` gets a page of its own. So does
the rest of every package, which may change at any time. A new file needs no change here. The build fails when
an exported object is missing from its page.
"""

import functools
import importlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

HERE = Path(__file__).parent
PACKAGE = "linrec"
LAB = "linrec.lab"
INSIDE = "Written for readers of the code. These objects may change with every version."
PLACE = re.compile(r"<!-- reference: ([\w.]+) -->")
IMAGE = re.compile(r"<img [^>]*>")

# MkDocs loads this file by its path, so what lies beside it is not on the path of imports
sys.path.insert(0, str(HERE))

import memory_pages  # noqa: E402
import mixer_pages  # noqa: E402
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
    for section in config.nav:
        if "Mixers" in section:
            section["Mixers"] += [*mixer_pages.navigation(), *memory_pages.navigation()]
    if results := sorted(path.relative_to(HERE).as_posix() for path in HERE.glob("results/*.md")):
        config.nav.append({"Results": results})
    config.nav += [{"Reference": _navigation(_public_pages())}, {"Inside": _navigation(_inside_pages())}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here; they replace the files with parts of their text."""
    for page in _pages():
        if written := files.get_file_from_path(page.uri):
            files.remove(written)
        files.append(File.generated(config, page.uri, content=page.text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in the tables and the reference of functions."""
    return PLACE.sub(
        lambda place: _block(place[1], level=3, heading=_imported_name(place[1])), tables.filled(markdown)
    )


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Give every picture its description as a title; the build fails for a picture without one."""

    def titled(image: re.Match[str]) -> str:
        alt = re.search(r'alt="([^"]+)"', image[0])
        if alt is None:
            raise PluginError(f"{page.file.src_uri} has a picture without a description: {image[0]}")
        return image[0] if "title=" in image[0] else image[0].replace("<img", f'<img title="{alt[1]}"', 1)

    return IMAGE.sub(titled, content)


def on_post_build(config: MkDocsConfig) -> None:
    """Check that nothing is missing."""
    for uri, objects in (*((page.uri, page.objects) for page in _pages()), *_operator_pages().items()):
        html = (Path(config.site_dir) / uri).with_suffix(".html").read_text()
        if missing := [name for name in objects if f'id="{name}"' not in html]:
            raise PluginError(f"{uri} lacks {', '.join(missing)}")


def _pages() -> tuple[Reference, ...]:
    return *_described_pages(), *_public_pages(), *_inside_pages()


@functools.cache
def _loaded() -> griffe.Module:
    loaded = griffe.load(PACKAGE, search_paths=[HERE.parent / "src"])
    assert isinstance(loaded, griffe.Module)
    return loaded


@functools.cache
def _operator_pages() -> dict[str, tuple[str, ...]]:
    """Return the pages of operators, each with the functions that it is the reference of."""
    texts = {path: path.read_text() for path in sorted(HERE.glob("operators/*.md"))}
    return {path.relative_to(HERE).as_posix(): tuple(PLACE.findall(text)) for path, text in texts.items()}


@functools.cache
def _described_pages() -> tuple[Reference, ...]:
    """Return the pages of mixers and of memories."""
    pages = []
    for maker in (mixer_pages, memory_pages):
        for name in maker.names():
            module = _loaded()[maker.module(name).removeprefix(f"{PACKAGE}.")]
            declared = [f"{module.path}.{member}" for member in module.exports or ()]
            blocks = [maker.before_reference(name), "## Reference"]
            blocks += [_block(path, level=3, heading=path.rpartition(".")[2]) for path in declared]
            pages.append(Reference(maker.title(name), maker.uri(name), "\n\n".join(blocks), tuple(declared)))
    return tuple(pages)


@functools.cache
def _public_pages() -> tuple[Reference, ...]:
    pages = []
    anywhere = _exported_anywhere()
    elsewhere = {path for objects in _operator_pages().values() for path in objects}
    elsewhere |= {path for page in _described_pages() for path in page.objects}
    for package in _rooms():
        exported = {path: name for path, name in _exported(package).items() if path not in elsewhere}
        blocks = [_block(package.path, level=1)]
        if apart := sorted(path for path in elsewhere if path.startswith(f"{package.path}.")):
            links = ", ".join(f"[{path.rpartition('.')[2]}][{path}]" for path in apart)
            blocks.append(f"These objects have pages of their own: {links}.")
        blocks += [_block(path, heading=heading) for path, heading in exported.items()]
        uri = _address("reference", package.path)
        pages.append(Reference(package.path, uri, "\n\n".join(blocks), tuple(exported)))
        for module in _modules(package):
            declared = [
                str(name)
                for name in module.exports or ()
                if not {f"{module.path}.{name}"} & (anywhere | elsewhere)
                and not module.members[str(name)].is_alias
            ]
            if declared and not module.is_init_module:
                objects = tuple(f"{module.path}.{name}" for name in declared)
                blocks = [_block(module.path, level=1), *(_block(path) for path in objects)]
                uri = _address("reference", module.path)
                pages.append(Reference(module.path, uri, "\n\n".join(blocks), objects))
    return tuple(pages)


@functools.cache
def _inside_pages() -> tuple[Reference, ...]:
    pages = []
    for package in (module for module in _modules(_loaded()) if module.is_init_module):
        blocks, objects = [f"# Inside {package.path}\n\n{INSIDE}"], []
        for module in (package, *_files(package)):
            own = [
                name
                for name, member in module.members.items()
                if not name.startswith("_")
                and not member.is_alias
                and (member.is_function or member.is_class)
                and member.path not in _exported_anywhere()
            ]
            if own and module.exports is None:
                blocks.append(_block(module.path, members=own))
                objects += [f"{module.path}.{name}" for name in own]
        if objects:
            uri = _address("inside", package.path)
            pages.append(Reference(package.path, uri, "\n\n".join(blocks), tuple(objects)))
    return tuple(pages)


@functools.cache
def _exported_anywhere() -> frozenset[str]:
    """Return the objects that have a place, though another package may define them, as for `ConfigError`."""
    return frozenset(path for package in _rooms() for path in _exported(package))


def _navigation(pages: Sequence[Reference]) -> list[dict[str, Any]]:
    """Return pages for the navigation: a section for each package that has several."""
    sections: dict[str, list[dict[str, Any]]] = {}
    for page in pages:
        parts = 3 if page.title.startswith(f"{LAB}.") else 2
        sections.setdefault(".".join(page.title.split(".")[:parts]), []).append({page.title: page.uri})
    return [entries[0] if len(entries) == 1 else {title: entries} for title, entries in sections.items()]


def _imported_name(path: str) -> str:
    """Return the name that users import an object of `linrec.ops` by."""
    return _exported(_loaded()["ops"])[path]


def _rooms() -> list[griffe.Module]:
    """Return the public packages: those of the library, then those of the laboratory."""
    library = [package for package in _packages(_loaded()) if package.path != LAB]
    return library + _packages(_loaded()["lab"])


def _address(folder: str, path: str) -> str:
    """Return the address of a page: rooms of the laboratory keep those that they had before it."""
    place = path.removeprefix(f"{LAB}.").removeprefix(f"{PACKAGE}.").replace(".", "/")
    return f"{folder}/{place}.md"


def _packages(package: griffe.Module) -> list[griffe.Module]:
    return [module for module in _own(package) if module.is_init_module]


def _files(package: griffe.Module) -> list[griffe.Module]:
    return [module for module in _own(package) if not module.is_init_module]


def _own(package: griffe.Module) -> list[griffe.Module]:
    """Return the modules of a package, without modules of other packages that it imports by name."""
    return [module for _, module in sorted(package.modules.items()) if not module.is_alias]


def _modules(package: griffe.Module) -> Iterator[griffe.Module]:
    """Yield the package itself and all modules below it, those of packages inside it too."""
    yield package
    yield from _files(package)
    for inner in _packages(package):
        yield from _modules(inner)


def _exported(package: griffe.Module) -> dict[str, str]:
    """Return the exports of a package and the packages in it: each path, and the name that users import."""
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
