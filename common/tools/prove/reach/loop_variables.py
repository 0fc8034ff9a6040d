"""Finds the variables of a loop whose values come from earlier passes or from its `for` statement.

A resumed run begins the loop anew, so it lacks such values even if the recipe binds no variable
before the loop. All other variables of a loop are computed in each pass, so they can't be the cause
of a difference.
"""

import ast
import types
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from common.storage.value_digests import digest_of_state
from common.tools.prove.reach.own_code import callers, is_own_frame
from common.tools.prove.reach.single_values import class_name
from common.tools.prove.records.run_records import LoopPass, ValueDescription

Loop = ast.For | ast.While
# Parts of a loop with variables of their own.
NAMED_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SCOPES = (*NAMED_SCOPES, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)


@dataclass(frozen=True)
class LoopVariables:
    """The names of a loop's variables that hold state from before the current pass."""

    # A pass reads such a variable before it sets it, as in `mean = 0.9 * mean + loss`.
    carried: frozenset[str] = frozenset()
    # The `for` statement sets these, and nothing else in the loop does.
    targets: frozenset[str] = frozenset()


def pass_of_loop(
    frame: types.FrameType, batch: object, step: int, micro_batch: int
) -> LoopPass | None:
    """Return the record of a pass that has ended; None if its loop has no variables to record.

    Args:
        frame: the frame that asks for the next batch. Its callers count as well, because a
            generator of the recipe may pass the batches on.
        batch: the batch of the pass, which other records cover.
        step: the number of updates before the batch.
        micro_batch: the number of the batch within its update.
    """
    targets: dict[str, str] = {}
    descriptions: dict[str, ValueDescription] = {}
    carried: set[str] = set()
    for caller in callers(frame):
        if not is_own_frame(caller):
            continue
        variables = loop_variables(caller.f_code.co_filename, caller.f_lineno)
        carried |= variables.carried
        values = caller.f_locals
        for name in sorted(variables.targets & values.keys()):
            value = values[name]
            if value is not batch and name not in targets:
                targets[name] = digest_of_state(value)
                text = f"{class_name(value)}, loop variable of {caller.f_code.co_name}()"
                descriptions[name] = ValueDescription(type="target", text=text)
    if not targets and not carried:
        return None
    return LoopPass(
        step=step,
        micro_batch=micro_batch,
        target_digests=targets,
        descriptions=descriptions,
        carried_variables=sorted(carried),
    )


@cache
def loop_variables(file: str, line: int) -> LoopVariables:
    """Return the variables of the innermost loop around a line; none without a loop.

    The loop has targets only if the line is in its `for` statement itself, and not in its body.
    """
    loops = [loop for loop in loops_of_file(file) if loop.lineno <= line <= last_line(loop)]
    if not loops:
        return LoopVariables()
    loop = max(loops, key=lambda loop: loop.lineno)
    reader = PassReader()
    reader.visit_each([loop])
    carried = frozenset(reader.read_first & reader.written)
    if not isinstance(loop, ast.For) or line > (loop.iter.end_lineno or loop.lineno):
        return LoopVariables(carried)
    body_reader = PassReader()
    body_reader.visit_each(loop.body)
    return LoopVariables(carried, frozenset(names_in(loop.target) - body_reader.written))


@cache
def loops_of_file(file: str) -> tuple[Loop, ...]:
    """Return the loops of a source file; none if it can't be read as Python."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, Loop))


def last_line(node: Loop) -> int:
    """Return the last line of a loop."""
    return node.end_lineno or node.lineno


def names_in(target: ast.expr) -> set[str]:
    """Return the variables that an assignment to a target sets."""
    names = set()
    for node in ast.walk(target):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


class PassReader:
    """Goes through one pass of a loop, in the order in which Python evaluates it.

    A variable counts as read first only if no branch sets it before. So a variable that the pass
    sets under a condition, and reads later under the same condition, does not count.
    """

    def __init__(self) -> None:
        self.read_first: set[str] = set()  # variables that were read before they were set
        self.written: set[str] = set()  # variables that were set so far

    def visit_each(self, nodes: Iterable[ast.AST]) -> None:
        """Go through nodes, one after the other."""
        for node in nodes:
            self.visit(node)

    def visit(self, node: ast.AST) -> None:
        """Go through a node and its parts."""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            if node.id not in self.written:
                self.read_first.add(node.id)
        elif isinstance(node, ast.If):
            self.visit_branches(node)
        elif isinstance(node, COMPREHENSIONS):
            written_before = set(self.written)
            self.visit_each(parts_in_order(node))
            self.written = written_before  # its variables are its own
        else:
            self.written |= names_set_by(node)
            self.visit_each(parts_in_order(node))

    def visit_branches(self, node: ast.If) -> None:
        """Go through both branches of a condition, each with the variables that were set before."""
        self.visit(node.test)
        written_before = set(self.written)
        self.visit_each(node.body)
        written_in_body = self.written
        self.written = written_before
        self.visit_each(node.orelse)
        self.written |= written_in_body


def parts_in_order(node: ast.AST) -> list[ast.AST]:
    """Return the parts of a node in the order in which Python evaluates them.

    Functions and classes have none, because their variables are their own.
    """
    if isinstance(node, SCOPES):
        return []
    parts = [*ast.iter_child_nodes(node)]
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        return [ast.Name(node.target.id, ast.Load()), node.value, node.target]
    if isinstance(node, ASSIGNMENTS):  # without a value, an annotation sets nothing
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [] if node.value is None else [node.value, *targets]
    if isinstance(node, (ast.For, ast.comprehension)):
        parts.sort(key=lambda part: part is not node.iter)
    elif isinstance(node, COMPREHENSIONS):
        parts.sort(key=lambda part: not isinstance(part, ast.comprehension))
    return parts


def names_set_by(node: ast.AST) -> set[str]:
    """Return the variables that a node sets by itself, without those of its parts."""
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, NAMED_SCOPES):
        return {node.name}
    if isinstance(node, ast.alias):
        return {(node.asname or node.name).partition(".")[0]}
    if isinstance(node, ast.ExceptHandler) and node.name is not None:
        return {node.name}
    return set()
