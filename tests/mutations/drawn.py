"""Draw mistakes in the source by a seed, over statements that tests execute.

A statement is drawn first, each as likely as every other, and then one of the changes that it allows:

- a comparison, an arithmetic or a logical operator becomes another; `not` and a minus go;
- an integer is off by one, another number is doubled, True becomes False; defaults of arguments too;
- the first two arguments of a call change places, as do both sides of `@` and of `a if c else b`;
- a keyword argument of a call is left out;
- a call for its effect, an assignment in place, or an early `return` is left out; a condition is turned.

Annotations, docstrings, messages and strings stay.
"""

import ast
import copy
import itertools
import random
from pathlib import Path
from typing import NamedTuple

from tests.mutations.executed import Executed, Test

PLACES = ("ops", "nn", "mixers", "models", "generation", "hf", "lab/train")
"""Folders of `src/linrec` in which mistakes are drawn."""

# file, function, text before and after: why no test can tell
EQUIVALENT: dict[tuple[str, str, str, str], str] = {
    (
        "ops/selective_scan/numba.py",
        "_lanes",
        "1",
        "2",
    ): "another number of lanes divides the work differently, with the same results",
    (
        "ops/kernels/elementwise/max_headed_triton.py",
        "_gates",
        "1",
        "2",
    ): "a further row is loaded under a mask, and no kernel reads it",
    (
        "models/recurrent_memory.py",
        "RecurrentMemory._separated",
        "0",
        "1",
    ): "steps that are hidden from a row may hold any number, since their outputs and states are replaced",
}

OTHER_OPERATOR: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
COMPILED = ("njit", "lane_kernel", "overload")
"""Words in the decorators of functions that Numba compiles."""
# their arguments in another order are errors of types, which show nothing
ORDERED = {"isinstance", "issubclass", "getattr", "hasattr", "setattr", "cast"}


class Mistake(NamedTuple):
    """A change of one piece of a file.

    Attributes:
        file: the file, below `src/linrec`.
        line: the line on which the piece begins.
        function: the function that holds the piece, as `Class.method`; empty for a module's own code.
        before: the piece.
        after: what stands in its place.
        place: the first byte of the piece in the file, and the first byte behind it.
    """

    file: str
    line: int
    function: str
    before: str
    after: str
    place: tuple[int, int]

    def __str__(self) -> str:
        where = f"{self.file}:{self.line} {self.function}".rstrip()
        return f"{where}: {' '.join(self.before.split())} -> {' '.join(self.after.split())}"

    def applied(self, source: bytes) -> bytes:
        """Return the file's content with the mistake."""
        start, stop = self.place
        if source[start:stop].decode() != self.before:
            raise ValueError(f"{self.file} changed since {self} was drawn")
        return source[:start] + self.after.encode() + source[stop:]


def draw(root: Path, executed: Executed, *, seed: int, count: int) -> list[tuple[Mistake, set[Test]]]:
    """Return `count` mistakes in a source tree, no two in one statement, and the tests that execute each.

    Args:
        root: the folder that holds `src`.
        executed: the lines that tests execute.
        seed: of the draw. Another tree, or tests that execute other lines, give other mistakes.
        count: how many.
    """
    files = [path for place in PLACES for path in sorted((root / "src/linrec" / place).rglob("*.py"))]
    found = [statement for path in files for statement in statements(root, path) if statement.mistakes]
    source = random.Random(seed)
    source.shuffle(found)
    drawn = []
    for lines, within, compiled, mistakes in found:
        mistake = source.choice(mistakes)
        if tests := executed.of(mistake.file, lines, within, compiled=compiled):
            drawn.append((mistake, tests))
        if len(drawn) == count:
            return drawn
    raise ValueError(f"`count` must be at most the number of executed statements, {len(drawn)}; got {count}")


class Statement(NamedTuple):
    """A statement, or the head of a compound statement: its lines, and what `Executed.of` asks for."""

    lines: range
    within: range
    compiled: bool
    mistakes: list[Mistake]


def statements(root: Path, path: Path) -> list[Statement]:
    """Return the statements of a file."""
    source = path.read_bytes()
    finder = _Finder(path.relative_to(root / "src/linrec").as_posix(), source)
    finder.visit(ast.parse(source))
    return finder.found


class _Finder(ast.NodeVisitor):
    """Collect the mistakes that each statement of a module allows."""

    def __init__(self, file: str, source: bytes):
        self.file, self.source = file, source
        lines = source.splitlines(keepends=True)
        self.starts = list(itertools.accumulate(map(len, lines), initial=0))
        self.whole = range(1, len(lines) + 1)
        self.names: list[str] = []
        # the functions around a statement, from the outermost to the innermost
        self.functions: list[ast.FunctionDef] = []
        self.found: list[Statement] = []

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            around = [*self.functions, node] if isinstance(node, ast.FunctionDef) else self.functions
            body = getattr(node, "body", None)
            stop = body[0].lineno if body else node.end_lineno + 1
            self.found.append(
                Statement(
                    # the body of `if x: return` is on the line of its head
                    range(node.lineno, max(stop, node.lineno + 1)),
                    range(around[-1].body[0].lineno, around[-1].end_lineno + 1) if around else self.whole,
                    any(
                        word in ast.unparse(d) for f in around for d in f.decorator_list for word in COMPILED
                    ),
                    [],
                )
            )
        super().visit(node)

    def change(self, node: ast.AST, after: ast.AST | str) -> None:
        """Note that `after` may stand in the place of a node, unless both are the same."""
        if isinstance(after, ast.AST) and ast.dump(after) == ast.dump(node):
            return
        start, stop = (
            self.starts[line - 1] + column
            for line, column in ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        )
        text = after if isinstance(after, str) else ast.unparse(ast.fix_missing_locations(after))
        if isinstance(node, ast.expr) and not isinstance(node, ast.Constant | ast.Call):
            text = f"({text})"
        function, before = ".".join(self.names), self.source[start:stop].decode()
        if (self.file, function, before, text) not in EQUIVALENT:
            self.found[-1].mistakes.append(
                Mistake(self.file, node.lineno, function, before, text, (start, stop))
            )

    def with_field(self, node: ast.AST, **fields: object) -> ast.AST:
        changed = copy.copy(node)
        for name, value in fields.items():
            setattr(changed, name, value)
        return changed

    def visit_all(self, nodes: list[ast.AST] | list[ast.expr] | list[ast.stmt]) -> None:
        for node in nodes:
            self.visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.names.append(node.name)
        self.visit_all([*node.args.defaults, *filter(None, node.args.kw_defaults)])
        self.functions.append(node)
        self.visit_all(node.body)
        self.functions.pop()
        self.names.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.append(node.name)
        self.visit_all(node.body)
        self.names.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            return
        if not isinstance(node.test, ast.UnaryOp | ast.Compare):
            self.change(node.test, ast.UnaryOp(ast.Not(), node.test))
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        if isinstance(node.value, ast.Call):
            self.change(node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        again = isinstance(target, ast.Name) and any(
            isinstance(part, ast.Name) and part.id == target.id for part in ast.walk(node.value)
        )
        if self.functions and (again or isinstance(target, ast.Attribute | ast.Subscript)):
            self.change(node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.change(node, "pass")
        if (other := OTHER_OPERATOR.get(type(node.op))) and not isinstance(node.value, ast.Constant):
            self.change(node, self.with_field(node, op=other()))
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        if node is not self.functions[-1].body[-1]:
            self.change(node, "pass")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for place, operator in enumerate(node.ops):
            ops = [*node.ops[:place], OTHER_OPERATOR[type(operator)](), *node.ops[place + 1 :]]
            self.change(node, self.with_field(node, ops=ops))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = any(isinstance(x, ast.JoinedStr) or _is(x, str) for x in (node.left, node.right))
        if isinstance(node.op, ast.MatMult):
            self.change(node, self.with_field(node, left=node.right, right=node.left))
        elif (other := OTHER_OPERATOR.get(type(node.op))) and not texts:
            self.change(node, self.with_field(node, op=other()))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.change(node, self.with_field(node, op=OTHER_OPERATOR[type(node.op)]()))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self.change(node, node.operand)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.change(node, self.with_field(node, body=node.orelse, orelse=node.body))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.change(node, str(not node.value))
        elif isinstance(node.value, int):
            self.change(node, str(node.value + 1))
        elif isinstance(node.value, float):
            self.change(node, repr(2 * node.value or 1.0))

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        first = node.args[:2]
        if len(first) == 2 and name not in ORDERED and not any(isinstance(x, ast.Starred) for x in first):
            self.change(node, self.with_field(node, args=[*reversed(first), *node.args[2:]]))
        for keyword in node.keywords:
            # False is what `zip` takes for `strict` anyway
            if keyword.arg is not None and ast.unparse(keyword) != "strict=False":
                kept = [other for other in node.keywords if other is not keyword]
                self.change(node, self.with_field(node, keywords=kept))
        self.generic_visit(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.body)


def _is(node: ast.AST, kind: type) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, kind)
