"""Keep src/vitral/options.py equal to config.py: `python scripts/typed_options.py` checks it, `--write` writes it."""

import ast
import inspect
import sys
from pathlib import Path
from typing import TypeGuard

from vitral import config

FILE = Path(__file__).parents[1] / "src" / "vitral" / "options.py"
GROUPS = ("TrainConfig", "PretrainConfig", "CompareConfig", "Probing", "QuantizeOptions", "Indexing")
"""The groups of options that functions accept as keywords; the groups inside them follow."""
OMITTED = {("CompareConfig", "models")}
"""Fields that the function has as a parameter of its own."""
PATHS = {("LoopConfig", "model"), ("TrainConfig", "model")}
"""Text that may also be a path or a run."""
HEADER = '''"""Options as types: the keywords of `vitral.train` and others, for type checkers and completion in editors.

Generated from config.py, which documents each option, by scripts/typed_options.py (`make format`); do not edit.
"""

from collections.abc import Sequence
from os import PathLike
from typing import Literal, TypedDict

from vitral import config
'''
COMPARE = '''

class CompareDict(TrainConfigDict, CompareConfigDict, total=False):
    """Options of `vitral.compare`: what is compared, and how every model is trained."""
'''


def generated() -> str:
    """Return the file as it should be."""
    classes = {node.name: node for node in ast.parse(inspect.getsource(config)).body if isinstance(node, ast.ClassDef)}
    wanted = _with_groups(classes, GROUPS)
    return HEADER + "".join(_typed_dict(node) for name, node in classes.items() if name in wanted) + COMPARE


def _with_groups(classes: dict[str, ast.ClassDef], names: tuple[str, ...]) -> set[str]:
    """The classes of these names, those that they inherit from, and the groups of options in their fields."""
    found: set[str] = set()
    for name in names:
        node = classes[name]
        inner = [each.id for part in (*node.bases, *_annotations(node)) for each in ast.walk(part) if _is_group(each)]
        found |= {name} | _with_groups(classes, tuple(inner))
    return found


def _annotations(node: ast.ClassDef) -> list[ast.expr]:
    return [item.annotation for item in node.body if isinstance(item, ast.AnnAssign)]


def _is_group(node: ast.AST) -> TypeGuard[ast.Name]:
    value = getattr(config, node.id, None) if isinstance(node, ast.Name) else None
    return isinstance(value, type) and issubclass(value, config.Options) and value is not config.Options


def _typed_dict(node: ast.ClassDef) -> str:
    bases = [f"{ast.unparse(base)}Dict" for base in node.bases if _is_group(base)] or ["TypedDict"]
    lines = [
        f"    {ast.unparse(item.target)}: {_input_type(node.name, item)}"
        for item in node.body
        if isinstance(item, ast.AnnAssign) and (node.name, ast.unparse(item.target)) not in OMITTED
    ]
    head = (
        f'class {node.name}Dict({", ".join(bases)}, total=False):\n    """Fields of `vitral.config.{node.name}`."""\n'
    )
    return f"\n\n{head}\n" + "\n".join(lines) + "\n"


def _input_type(group: str, item: ast.AnnAssign) -> str:
    """The type of what may be given for a field, which is more than what it holds."""
    more = " | PathLike[str]" * ((group, ast.unparse(item.target)) in PATHS)
    return ast.unparse(_Inputs().visit(item.annotation)).replace("'", '"') + more


class _Inputs(ast.NodeTransformer):
    """Names of config.py as its attributes, groups also as dictionaries, and tuples of any length also as lists."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if not hasattr(config, node.id) or node.id in ("Literal", "Any"):
            return node
        also = f" | {node.id}Dict" if _is_group(node) else ""
        return ast.parse(f"config.{node.id}{also}", mode="eval").body

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        if ast.unparse(node).startswith("tuple[") and ast.unparse(node).endswith(", ...]"):
            assert isinstance(node.slice, ast.Tuple)
            return ast.parse(f"Sequence[{ast.unparse(self.visit(node.slice.elts[0]))}]", mode="eval").body
        return node if ast.unparse(node.value) == "Literal" else self.generic_visit(node)  # type: ignore[return-value]


def main() -> int:
    """Check or write; return 1 if the file is not as it should be."""
    if "--write" in sys.argv:
        FILE.write_text(generated())
    right = FILE.exists() and FILE.read_text() == generated()
    print(f"{FILE.name}: {'equal to config.py' if right else 'out of date; make format writes it'}")
    return not right


if __name__ == "__main__":
    sys.exit(main())
