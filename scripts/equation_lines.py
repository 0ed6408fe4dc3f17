"""Keep the line numbers of docs/equations.md true: `python scripts/equation_lines.py` checks, `--write` corrects.

A row of its tables ends in a quoted piece of code and a link `[file:line](../src/vitral/file#Lline)`. The link must
name the first line of the file in which the code stands: what the ViT needs comes before what was added to it.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "equations.md"
ROW = re.compile(r"`(?P<code>[^`]+)` \| \[(?P<file>[\w/]+\.py):(?P<line>\d+)\]\((?P<link>[^)]+)\)")


def corrected(page: str) -> tuple[str, list[str]]:
    """Return the page with true line numbers, and what was wrong with it."""
    problems: list[str] = []

    def mend(row: re.Match[str]) -> str:
        code, file = row["code"], row["file"]
        lines = (ROOT / "src" / "vitral" / file).read_text().splitlines()
        found = [number for number, line in enumerate(lines, start=1) if code in line]
        if not found:
            problems.append(f"{code!r} does not stand in {file}")
            return row[0]
        right = f"`{code}` | [{file}:{found[0]}](../src/vitral/{file}#L{found[0]})"
        if right != row[0]:
            problems.append(f"{code!r} is in line {found[0]} of {file}, not {row['line']}")
        return right

    return ROW.sub(mend, page), problems


def main() -> int:
    """Check or correct; return 1 if something is left to mend."""
    page, problems = corrected(PAGE.read_text())
    if "--write" in sys.argv:
        PAGE.write_text(page)
        problems = corrected(page)[1]
    print("\n".join(problems) or f"{PAGE.name}: every line number is true")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
