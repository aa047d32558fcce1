"""Makes a page for each memory across the stack from the code, as `mixer_pages` makes a page for each mixer.

A page has the paper and the equations. Tables of the arguments, of the state and of the allowed splits of a
sequence follow, with the mixers that the memory takes, and commands. The file `docs/memories/NAME.md` is the
section "Use" of the page. The comparison with released code and the reference come last.
"""

import functools
import importlib
import inspect
import re
from typing import Any

import safetensors
import tables
import torch
from mixer_pages import WIDTHS, held, joined, shapes, sizes, written

from linrec import mixers
from linrec.models import LanguageModel, MemoryConfig, ModelConfig, StackMemory
from linrec.models.config import ARGUMENTS

# of the model whose state is shown, and of the segments of the task segment-copy
LENGTH, COPIED = 16, 24
ARGUMENT = re.compile(r"^    (\w+): (.+?)(?=\n    \w|\n\n)", re.MULTILINE | re.DOTALL)
# steps of the calls that run three segments of four steps, and a step with a reset
SPLITS: dict[str, tuple[list[int], int | None]] = {
    "one call": ([12], None),
    "calls of whole segments": ([4, 8], None),
    "a call that ends within a segment": ([3, 9], None),
    "calls of one step": ([1] * 12, None),
    "a reset at a boundary": ([12], 4),
    "a reset within a segment": ([12], 6),
}


def names() -> list[str]:
    """Return the kinds of memories."""
    return list(ARGUMENTS)


def title(name: str) -> str:
    """Return the name of a memory's class."""
    found = vars(importlib.import_module(module(name))).values()
    kinds = [kind for kind in found if isinstance(kind, type) and issubclass(kind, StackMemory)]
    return next(kind.__name__ for kind in kinds if kind.__module__ == module(name))


def module(name: str) -> str:
    """Return the module of a memory."""
    return f"linrec.models.{name}"


def uri(name: str) -> str:
    """Return where the page of a memory is."""
    return f"memories/{name}.md"


def navigation() -> list[dict[str, Any]]:
    """Return the section for the navigation, with the pages of all memories."""
    return [{"Memory across the stack": [{title(name): uri(name)} for name in names()]}]


@functools.cache
def before_reference(name: str) -> str:
    """Return the page of a memory up to its reference, as Markdown."""
    mixer, given = stack(name, LENGTH)
    arguments = {"vocab_size": 256, "d_model": WIDTHS[0], "n_layers": 1, "mixer": mixer}
    arguments |= {"mixer_args": given} if given else {}
    lines = (f"    {argument}={value!r},\n" for argument, value in arguments.items())
    example = (
        "from linrec.models import LanguageModel, MemoryConfig, ModelConfig\n\n"
        f"memory = MemoryConfig(kind={name!r}, segment_length={LENGTH})\n"
        f"config = ModelConfig(\n{''.join(lines)}    memory=memory,\n)\n"
        "model = LanguageModel(config)"
    ).replace("'", '"')
    return joined(
        name,
        title(name),
        module(name),
        example,
        {
            "Arguments": _arguments(name),
            "Mixers": _mixers(name),
            "State": _state(name),
            "Splits": _splits(name),
            "Commands": _commands(name),
            "Use": written(uri(name)),
            "Comparison with released code": _released(name),
        },
    )


def stack(name: str, length: int) -> tuple[str, dict[str, int]]:
    """Return a mixer that the memory takes, and its arguments for segments of `length` steps."""
    taken = tables.taken(name)
    mixer = "attention" if "attention" in taken else taken[0]
    return mixer, {"segment_length": length} if tables.by_segments(mixer) else {}


def _arguments(name: str) -> str:
    described = dict(ARGUMENT.findall(inspect.getdoc(MemoryConfig) or ""))
    fields = MemoryConfig.__dataclass_fields__
    rows = [
        (f"`{field}`", f"`{fields[field].default!r}`", " ".join(described[field].split()))
        for field in fields
        if field in MemoryConfig.fields_of(name) - {"kind"}
    ]
    table = tables.markdown_table(("argument", "default", "meaning"), rows)
    return (
        "Arguments of [`MemoryConfig`][linrec.models.MemoryConfig] that the memory reads. The others must "
        f"keep their defaults.\n{table}"
    )


def _mixers(name: str) -> str:
    taken = tables.taken(name)
    links = ", ".join(f"[`{mixer}`](../mixers/{mixer}.md)" for mixer in taken)
    text = f"The memory takes {'all causal mixers' if taken == tables.causal() else links}"
    text += " with their default arguments, and patterns of them." if len(taken) > 1 else "."
    if "form" in ARGUMENTS[name]:
        encoder = MemoryConfig(kind=name, form="encoder")
        sees = [mixer for mixer in taken if "causal" in inspect.signature(mixers.get(mixer)).parameters]
        links = ", ".join(
            f"[`{mixer}`](../mixers/{mixer}.md)"
            for mixer in sees
            if tables.takes(encoder, mixer, causal=False)
        )
        text += f" The encoder form takes mixers that see the future: {links} with `causal=False`."
    return text


def _state(name: str) -> str:
    pairs = [(_model(name, width, memory=True), _model(name, width, memory=False)) for width in WIDTHS]
    model, steps = pairs[0][0], 2 * LENGTH - 1
    after = held(model, torch.zeros(1, steps, dtype=torch.int64, device="meta"))
    counts = {
        "state size of the memory": [each.memory.state_size for each, _ in pairs],
        "parameters of the memory": [_parameters(each) - _parameters(plain) for each, plain in pairs],
    }
    text = (
        "The state size of the memory counts neither the states of the layers, nor `state.alive` and "
        "`state.position`. `model.state_size` adds the state sizes of the layers."
    )
    if len(after) > 1:
        text += " After `eval()`, calls without gradients keep keys and values too, which no size counts."
    return (
        f"The state of the model above, at the start and after {steps} steps, the last before the end of a "
        f"segment:\n{shapes(model.init_state(1), after)}{text} For segments of {LENGTH} steps:\n"
        f"{sizes(counts)}"
    )


def _splits(name: str) -> str:
    forms = ("decoder", "encoder") if "form" in ARGUMENTS[name] else ("decoder",)
    header = [f'`form="{form}"`' for form in forms] if len(forms) > 1 else ["answer"]
    rows = [
        (call, *("allowed" if allows(name, form, *split) else "refused" for form in forms))
        for call, split in SPLITS.items()
    ]
    table = tables.markdown_table(("three whole segments", *header), rows)
    return (
        "The outputs of several calls, each with the state of the call before, are the outputs of one call. "
        f"[Time parallelism](../parallel.md) is refused.\n{table}"
    )


def allows(name: str, form: str, pieces: list[int], reset: int | None) -> bool:
    """Return whether a memory runs a sequence in pieces of these lengths, with a reset before a step.

    Raises:
        AssertionError: the outputs are not those of one call.
    """
    mixer, given = stack(name, 4)
    memory = MemoryConfig(kind=name, form=form, segment_length=4)
    args = {"causal": False} if form == "encoder" else given
    with torch.random.fork_rng(devices=[]):
        model = LanguageModel(
            ModelConfig(vocab_size=7, d_model=8, n_layers=2, mixer=mixer, mixer_args=args, memory=memory)
        ).double()
    tokens = torch.arange(sum(pieces))[None] % 7
    resets = None if reset is None else (torch.arange(sum(pieces)) == reset)[None]
    outputs, state = [], None
    try:
        for piece in torch.arange(sum(pieces)).split(pieces):
            y, state = model(tokens[:, piece], state, reset=None if resets is None else resets[:, piece])
            outputs.append(y)
    except ValueError:
        return False
    torch.testing.assert_close(torch.cat(outputs, 1), model(tokens, reset=resets)[0])
    return True


def _commands(name: str) -> str:
    mixer, given = stack(name, COPIED)
    options = "".join(f" --model.mixer-args.segment-length {n}" for n in given.values())
    arguments = f"(segment_length={COPIED})"
    variant = f"{mixer}{arguments if given else ''}@{name}{arguments}"
    return (
        f"The task `segment-copy` has segments of {COPIED} steps:\n\n```bash\n"
        f".venv/bin/linrec train segment-copy --model.mixer {mixer}{options} \\\n"
        f"    --model.memory.kind {name} --model.memory.segment-length {COPIED}\n"
        f".venv/bin/linrec bench segments --mixers {mixer} '{variant}'\n"
        "```"
    )


def _released(name: str) -> str:
    file = tables.ROOT / "tests/models" / f"{name}.safetensors"
    with safetensors.safe_open(file, "pt") as numbers:
        code = tables.link(numbers.metadata())
        has_gradients = any("grad" in key for key in numbers.keys())  # noqa: SIM118
        compared = "Outputs and gradients" if has_gradients else "Outputs"
    return f"{compared} in float64 agree with {code}. [Use](#use) has the conditions."


def _model(name: str, width: int, *, memory: bool) -> LanguageModel:
    mixer, given = stack(name, LENGTH)
    config = MemoryConfig(kind=name, segment_length=LENGTH) if memory else MemoryConfig()
    with torch.device("meta"):
        return LanguageModel(
            ModelConfig(
                vocab_size=256, d_model=width, n_layers=1, mixer=mixer, mixer_args=given, memory=config
            )
        )


def _parameters(model: LanguageModel) -> int:
    return sum(p.numel() for p in model.parameters())
