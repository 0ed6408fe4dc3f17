"""Keep docs/options.md true: `python scripts/options_page.py` checks, `--write` writes it from vitral/config.py."""

import ast
import inspect
import sys
from pathlib import Path

from vitral import config

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
INTRO = """# Every option

Written from [config.py](../src/vitral/config.py), where each has its one default, by `make format`.
"""


def page() -> str:
    """The page as it should be: a table for each group of options."""
    tables = [INTRO]
    for node in ast.parse(inspect.getsource(config)).body:
        if isinstance(node, ast.ClassDef) and issubclass(getattr(config, node.name), config.Options) and node.bases:
            parent = ast.unparse(node.bases[0])
            also = f" It has the options of {parent} too." if parent != "Options" else ""
            about = f"{ast.get_docstring(node)}{also}"
            tables.append(f"## {node.name}\n\n{about}\n\n| option | default | what it is |\n|---|---|---|")
            for item, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(item, ast.AnnAssign) and item.value is not None:
                    assert isinstance(after, ast.Expr)
                    assert isinstance(after.value, ast.Constant)
                    kind = _words(item.annotation)
                    tables[-1] += (
                        f"\n| `{ast.unparse(item.target)}` | `{ast.unparse(item.value)}` | {after.value.value}{kind} |"
                    )
            tables[-1] += "\n"
    return "\n".join(tables)


def _words(annotation: ast.expr) -> str:
    """The words that an option may be, if it is one of a few."""
    choices = getattr(getattr(config, ast.unparse(annotation), None), "__args__", ())
    return f" ({', '.join(f'`{word}`' for word in choices)})" if choices else ""


def main() -> int:
    """Check or write; return 1 if the page is not as it should be."""
    if "--write" in sys.argv:
        PAGE.write_text(page())
    right = PAGE.exists() and PAGE.read_text() == page()
    print(f"{PAGE.name}: {'every option is as in config.py' if right else 'out of date; make format writes it anew'}")
    return not right


if __name__ == "__main__":
    sys.exit(main())
