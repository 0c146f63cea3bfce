"""Leaves of two trees are matched in `breadbox.model.trees` alone, by path: nowhere by position.

A check of the product's source. What comes from taking a tree apart, by `flatten` and its like, is
followed through assignments, loops and functions of its module, under whatever names, and may meet
nothing else in a `zip` or `map`: `leaves_as` returns leaves in the order of another tree. Nor may
the values of two dicts.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = ("client", "adapters", "offline", "learner", "rollout_worker", "policies", "console")
FLATTENERS = {
    f"{module}.{name}"
    for module in ("breadbox.model.trees", "breadbox_adapters.reverb.items")
    for name in ("flatten", "flatten_leaves", "leaves", "flatten_with_path")
}
HOMES = ("breadbox/model/trees.py", "breadbox_adapters/reverb/items.py")
PAIRING = ("zip", "map", "zip_longest")
Function = ast.FunctionDef | ast.AsyncFunctionDef
DICT_PARTS = ("values", "items")


class Module:
    """What a module's names stand for, and which of its functions return leaves."""

    def __init__(self, tree: ast.Module) -> None:
        self.names: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom | ast.Import):
                home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                for each in node.names:
                    self.names[each.asname or each.name] = f"{home}{each.name}"
        self.functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
        self.returning: set[str] = set()

    def origin(self, node: ast.AST) -> str:
        if isinstance(node, ast.Name):
            return self.names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{self.origin(node.value)}.{node.attr}"
        return ""

    def has_leaves(self, node: ast.AST, held: set[str]) -> bool:
        """Whether an expression has leaves of a tree that was taken apart."""
        for each in ast.walk(node):
            name = self.origin(each)
            if name in FLATTENERS or name.removeprefix("self.") in self.returning:
                return True
            if isinstance(each, ast.Name) and each.id in held:
                return True
        return False

    def held_in(self, function: Function) -> set[str]:
        """Names in a function that stand for leaves; note whether it returns some."""
        held: set[str] = set()
        nodes = list(ast.walk(function))
        for _ in range(2):  # Assignments in a loop reach what is above them.
            for node in nodes:
                for target, value in bindings(node):
                    if self.has_leaves(value, held):
                        held |= names_in(target)
        for node in nodes:
            if isinstance(node, ast.Return) and node.value and self.has_leaves(node.value, held):
                self.returning.add(function.name)
        return held

    def wrong_in(self, function: Function) -> Iterator[int]:
        held = self.held_in(function)
        for node in ast.walk(function):
            name = self.origin(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""
            if name not in PAIRING or not isinstance(node, ast.Call):
                continue
            arguments = node.args[name == "map" :]
            if len(arguments) < 2 and not any(isinstance(each, ast.Starred) for each in arguments):
                continue
            parts = [part for each in arguments for part in parts_of_dicts(each)]
            if len(parts) > 1 or any(self.has_leaves(each, held) for each in arguments):
                yield node.lineno


def parts_of_dicts(argument: ast.AST) -> list[bool]:
    """One entry for each dict whose values are paired; two for those of several."""
    inner = argument.value if isinstance(argument, ast.Starred) else argument
    is_several = isinstance(inner, ast.GeneratorExp | ast.ListComp)
    each = inner.elt if isinstance(inner, ast.GeneratorExp | ast.ListComp) else inner
    if not isinstance(each, ast.Call) or not isinstance(each.func, ast.Attribute) or each.args:
        return []
    return [True] * (1 + is_several) if each.func.attr in DICT_PARTS else []


def bindings(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    match node:
        case ast.Assign():
            yield from ((target, node.value) for target in node.targets)
        case ast.AugAssign() | ast.NamedExpr():
            yield node.target, node.value
        case ast.AnnAssign() if node.value is not None:
            yield node.target, node.value
        case ast.For() | ast.comprehension():
            yield node.target, node.iter


def names_in(target: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def wrong_lines(source: str) -> list[int]:
    if not any(each in source for each in PAIRING):
        return []
    module = Module(ast.parse(source))
    for _ in range(2):  # Functions that return what another one returns.
        for function in module.functions:
            module.held_in(function)
    return sorted({line for each in module.functions for line in module.wrong_in(each)})


def test_no_leaves_of_two_trees_are_matched_by_their_position() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for place in PLACES
        for path in sorted((ROOT / place).rglob("*.py"))
        if not path.as_posix().endswith(HOMES)
        for line in wrong_lines(path.read_text())
    ]
    assert [] == wrong


IMPORTS = "from breadbox.model import trees\nfrom breadbox.model.trees import flatten as f\n"


@pytest.mark.parametrize(
    "body",
    [
        "return zip(f(a)[1], f(b)[1])",
        "one, other = f(a)[1], f(b)[1]\n  return list(zip(one, other, strict=True))",
        "_, pairs = f(a)\n  for (_, x), y in zip(pairs, trees.leaves(b)): pass",
        "columns = [trees.flatten_leaves(each)[1] for each in (a, b)]\n  return [*zip(*columns)]",
        "return zip(*map(f, (a, b)))",
        "return [x for x in zip(a.values(), b.values())]",
        "def of(tree): return f(tree)[1]\n  return map(max, of(a), of(b))",
    ],
)
def test_the_check_finds_leaves_under_any_name(body: str) -> None:
    assert wrong_lines(f"{IMPORTS}def g(a, b):\n  {body}\n")


@pytest.mark.parametrize(
    "body",
    [
        "return zip(names, trees.leaves_as(a, b), strict=True)",
        "structure, pairs = f(a)\n  return [x for _, x in pairs]",
        "return zip(self.leaves, b)",
        "return dict(zip(names, a.values()))",
    ],
)
def test_the_check_lets_leaves_of_one_tree_pass(body: str) -> None:
    assert [] == wrong_lines(f"{IMPORTS}def g(self, a, b, names):\n  {body}\n")
