"""What a module's syntax tree says about the places of mutants: where they count, what they touch.

Left out, since no test should notice them: type annotations, asserts, texts of errors, log lines,
`TYPE_CHECKING` and what only another platform runs. The limits in the annotations of a message's
fields do count.
"""

import ast
import sys
from typing import Final, NamedTuple

Place = tuple[int, int]
"""Line from 1, column from 0 in characters."""
LOGGERS: Final = frozenset({"log", "_log"})
OTHER_PLATFORM: Final = (
    "sys.platform == 'linux'" if sys.platform == "darwin" else ("sys.platform == 'darwin'")
)
Definition = ast.FunctionDef | ast.AsyncFunctionDef


class Span(NamedTuple):
    """From one place up to another, which it does not include."""

    start: Place
    end: Place

    def contains(self, other: "Span") -> bool:
        """Whether all of another span lies in this one."""
        return self.start <= other.start and other.end <= self.end


class Replacement(NamedTuple):
    """A text to stand at a place instead of what is there."""

    span: Span
    text: str


class Shape(ast.NodeVisitor):
    """The places of one module. Owns its lists, which are complete when it is made."""

    def __init__(self, source: str) -> None:
        self.removals: list[Replacement] = []
        """Each statement of a function that does something, with `pass` instead."""
        self.emptied: list[Replacement] = []
        """Each function's body, with an immediate return instead."""
        self._lines = source.splitlines(keepends=True)
        self._scope: list[str] = []
        self._function: str | None = None
        self._left_out: list[Span] = []
        self._types: list[Span] = []
        self._statements: list[tuple[Span, Span]] = []
        self._functions: list[tuple[Span, str]] = []
        self.visit(ast.parse(source))

    def is_left_out(self, span: Span, *, is_number: bool) -> bool:
        """Whether a change there is one that no test should notice."""
        if any(place.contains(span) for place in self._left_out):
            return True
        return not is_number and any(place.contains(span) for place in self._types)

    def statement_at(self, span: Span) -> tuple[int, int]:
        """First and last line of the innermost statement around a place, without its body."""
        heads = [head for whole, head in self._statements if whole.contains(span)]
        head = heads[-1] if heads else span
        return head.start[0], head.end[0]

    def function_at(self, span: Span) -> str | None:
        """The outermost function whose body holds a place, None where importing runs the place."""
        return next((name for body, name in self._functions if body.contains(span)), None)

    def visit(self, node: ast.AST) -> None:
        """Note a statement, then what is special about it."""
        if isinstance(node, ast.stmt):
            whole = self._span(node)
            body = getattr(node, "body", [])
            end = self._span(body[0]).start if body else whole.end
            self._statements.append((whole, Span(whole.start, max(whole.start, end))))
            if self._function is not None and _does_something(node):
                self.removals.append(Replacement(whole, "pass"))
        super().visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """A class gives its functions their names; its slots save memory and nothing else."""
        self._left_out += [
            self._span(keyword.value)
            for decorator in node.decorator_list
            if isinstance(decorator, ast.Call)
            for keyword in decorator.keywords
            if keyword.arg == "slots"
        ]
        self._scope.append(node.name)
        self.generic_visit(node)
        self._scope.pop()

    def visit_FunctionDef(self, node: Definition) -> None:
        """Decorators and defaults run at import, the body does not."""
        for outside in (*node.decorator_list, node.args):
            self.visit(outside)
        if node.returns is not None:
            self._left_out.append(self._span(node.returns))
        outer, body = self._function, [each for each in node.body if not _is_text(each)]
        self._scope.append(node.name)
        if body:
            whole = Span(self._span(body[0]).start, self._span(body[-1]).end)
            if outer is None:
                self._function = ".".join(self._scope)
                self._functions.append((whole, self._function))
            makes = any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(node))
            self.emptied.append(Replacement(whole, "return; yield" if makes else "return"))
            for statement in body:
                self.visit(statement)
        self._scope.pop()
        self._function = outer

    def visit_arg(self, node: ast.arg) -> None:
        """A parameter's annotation says nothing at run time."""
        if node.annotation is not None:
            self._left_out.append(self._span(node.annotation))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """The annotation of a message's field holds its limits."""
        is_field = self._function is None and bool(self._scope)
        (self._types if is_field else self._left_out).append(self._span(node.annotation))
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        """A module's assignment of a union or an `Annotated` names a type."""
        if self._function is None and not self._scope:
            self._types += [
                self._span(each)
                for each in ast.walk(node.value)
                if isinstance(each, ast.BinOp) and isinstance(each.op, ast.BitOr)
            ]
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Asserts state invariants; nothing that comes from outside reaches them."""
        self._left_out.append(self._span(node))

    def visit_Raise(self, node: ast.Raise) -> None:
        """An error's text may have any wording."""
        texts = (each for each in ast.walk(node) if isinstance(each, ast.JoinedStr))
        self._left_out += [self._span(each) for each in texts]

    def visit_If(self, node: ast.If) -> None:
        """`TYPE_CHECKING` is false whenever anything runs, and so is another platform's name."""
        test = ast.unparse(node.test)
        if test == "TYPE_CHECKING":
            self._left_out.append(self._span(node))
        elif test == OTHER_PLATFORM:
            self._left_out.append(Span(self._span(node).start, self._span(node.body[-1]).end))
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        """A line of the log may say anything."""
        if _is_log_line(node):
            self._left_out.append(self._span(node))
        else:
            self.generic_visit(node)

    def _span(self, node: ast.stmt | ast.expr) -> Span:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        first = getattr(node, "decorator_list", None)
        line = first[0].lineno if first else node.lineno
        return Span(
            (line, self._characters(node.lineno, node.col_offset)),
            (node.end_lineno, self._characters(node.end_lineno, node.end_col_offset)),
        )

    def _characters(self, line: int, offset_bytes: int) -> int:
        return len(self._lines[line - 1].encode()[:offset_bytes].decode())


def replaced(source: str, replacement: Replacement) -> str:
    """``source`` with the replacement; what follows keeps its line numbers."""
    (line, column), (end_line, end_column) = replacement.span
    lines = source.splitlines(keepends=True)
    changed = lines[line - 1][:column] + replacement.text + "\n" * (end_line - line)
    changed += lines[end_line - 1][end_column:]
    return "".join((*lines[: line - 1], changed, *lines[end_line:]))


def _does_something(node: ast.stmt) -> bool:
    """Whether removing a statement leaves code that still runs, but does less."""
    match node:
        case ast.Expr():
            return not _is_text(node) and not _is_log_line(node)
        case ast.Assign(targets=targets):
            # Without the assignment of a name what follows mostly cannot run at all.
            return any(isinstance(target, ast.Attribute | ast.Subscript) for target in targets)
        case ast.AugAssign() | ast.Delete() | ast.Raise() | ast.Continue() | ast.Break():
            return True
        case ast.Return(value=None):
            return True
        case _:
            return False


def _is_text(node: ast.stmt) -> bool:
    """A docstring, or the `...` of a declaration."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_log_line(node: ast.Expr) -> bool:
    match node.value:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name))):
            return name in LOGGERS
        case _:
            return False
