"""Small deliberate faults in Python source: finding them, choosing a sample, applying one.

Not a script: benchmarks/mutants.py applies them to cyber0. A mutant replaces one expression or statement of a file and
leaves the rest of its text alone. What only words an error, and annotations, are not mutated: no test should pin them.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_FLIPS = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_BOUNDARIES = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr, ast.MatMult: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One fault: `file` with its bytes [start, end) replaced by `text`."""

    file: str
    """Relative to the root of the sources."""
    line: int
    operator: str
    before: str
    """The source line, without its indentation."""
    after: str
    """The same line with the fault; where the fault spans several lines, they become one."""
    place: str
    """Qualified name of what encloses it, and how many of the same changes precede it there."""
    start: int
    end: int
    text: str

    @property
    def key(self) -> str:
        """What identifies it while other lines come and go."""
        name = "\n".join((self.file, self.place, self.operator, self.before, self.after))
        return hashlib.sha256(name.encode()).hexdigest()[:12]

    def apply(self, source: bytes) -> bytes:
        """Return the file's bytes with the fault in them."""
        return source[: self.start] + self.text.encode() + source[self.end :]


def find(source: bytes, file: str) -> list[Mutant]:
    """Return every mutant of a source file, in the order of the file."""
    lines = source.splitlines(keepends=True)
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    found: list[Mutant] = []
    seen: dict[tuple[str, ...], int] = {}
    for node, operator, text, scope in _changes(ast.parse(source), ""):
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, end = offsets[node.lineno - 1] + node.col_offset, offsets[node.end_lineno - 1] + node.end_col_offset
        mutated = source[:start] + text.encode() + source[end:]
        last = mutated.index(b"\n", start + len(text.encode())) if b"\n" in mutated[start:] else len(mutated)
        before = lines[node.lineno - 1].decode().strip()
        after = mutated[offsets[node.lineno - 1] : last].decode().strip()
        same = (scope, operator, before, after)
        seen[same] = seen.get(same, 0) + 1
        try:
            compile(mutated, file, "exec")
        except SyntaxError:
            continue
        place = f"{scope}#{seen[same]}"
        found.append(Mutant(file, node.lineno, operator, before, after, place, start, end, text))
    return sorted(found, key=lambda m: (m.start, m.operator, m.text))


def sample(mutants: Iterable[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants, of each operator in turn and of different lines.

    Which ones, the seed and the mutants' own keys decide: an edit elsewhere leaves the choice nearly as it was.
    """
    ranked: dict[str, list[Mutant]] = {}
    for mutant in sorted(mutants, key=lambda m: hashlib.sha256(f"{seed} {m.key}".encode()).digest()):
        ranked.setdefault(mutant.operator, []).append(mutant)
    chosen: list[Mutant] = []
    lines: set[tuple[str, int]] = set()
    while len(chosen) < count and any(ranked.values()):
        for operator in sorted(ranked):
            while ranked[operator]:
                mutant = ranked[operator].pop(0)
                if (mutant.file, mutant.line) not in lines:
                    lines.add((mutant.file, mutant.line))
                    chosen.append(mutant)
                    break
    return chosen[:count]


_Change = tuple[ast.expr | ast.stmt, str, str, str]


def _changes(node: ast.AST, scope: str) -> Iterator[_Change]:
    """Yield (what is replaced, operator, by which text, in which scope) for everything below a node."""
    for child in _children(node):
        inner = scope
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{scope}.{child.name}".lstrip(".")
        elif isinstance(child, ast.stmt):
            yield from ((child, operator, text, scope) for operator, text in _of_statement(child))
        if isinstance(child, ast.expr):
            yield from ((child, operator, text, scope) for operator, text in _of_expression(child))
        yield from _changes(child, inner)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what of a node's parts may be mutated."""
    skipped: set[int] = set()
    if isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Raise, ast.Assert)):
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        skipped |= {id(part) for part in node.decorator_list}
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        skipped |= {id(node.returns)}
    if isinstance(node, ast.arg) or (isinstance(node, ast.keyword) and node.arg == "strict"):
        return
    if isinstance(node, ast.AnnAssign):
        skipped |= {id(node.annotation)}
        if "TypeAlias" in ast.dump(node.annotation):
            return
    for child in ast.iter_child_nodes(node):
        if id(child) not in skipped:
            yield child


def _of_statement(node: ast.stmt) -> Iterator[tuple[str, str]]:
    simple = isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await))
    stored = isinstance(node, ast.Assign) and all(isinstance(t, (ast.Attribute, ast.Subscript)) for t in node.targets)
    if simple or stored or isinstance(node, (ast.AugAssign, ast.Raise, ast.Continue, ast.Break, ast.Delete)):
        yield "drop statement", "pass"
    if isinstance(node, ast.Return):
        yield "drop return", "pass" if node.value is None else ast.unparse(ast.Expr(node.value))
    if isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC and not _is_text(node.value):
        changed = copy.deepcopy(node)
        changed.op = _ARITHMETIC[type(node.op)]()
        yield "arithmetic", ast.unparse(changed)


def _of_expression(node: ast.expr) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            for name, table in (("comparison", _FLIPS), ("boundary", _BOUNDARIES)):
                if type(op) in table:
                    changed = copy.deepcopy(node)
                    changed.ops[i] = table[type(op)]()
                    yield name, f"({ast.unparse(changed)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not _is_text(node):
        swapped = copy.deepcopy(node)
        swapped.op = _ARITHMETIC[type(node.op)]()
        yield "arithmetic", f"({ast.unparse(swapped)})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield "arithmetic", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant):
        yield from _of_constant(node.value)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "boolean", f"bool({ast.unparse(node.operand)})"
    elif isinstance(node, ast.BoolOp):
        other = copy.deepcopy(node)
        other.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        yield "boolean", f"({ast.unparse(other)})"
    elif isinstance(node, ast.IfExp):
        turned = copy.deepcopy(node)
        turned.body, turned.orelse = node.orelse, node.body
        yield "boolean", f"({ast.unparse(turned)})"
    elif isinstance(node, ast.Call):
        for i, keyword in enumerate(node.keywords):
            if keyword.arg not in (None, "strict"):  # strict=True asserts what holds anyway
                fewer = copy.deepcopy(node)
                del fewer.keywords[i]
                yield "drop keyword", ast.unparse(fewer)


def _of_constant(value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, bool):
        yield "boolean", repr(not value)
    elif isinstance(value, int):
        yield "constant", repr(value + 1)
        yield "constant", f"({value - 1!r})"
    elif isinstance(value, float):
        yield "constant", repr(value + 1.0)


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))
