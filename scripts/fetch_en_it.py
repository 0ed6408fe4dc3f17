"""Make a table of English-Italian pairs from the message catalogues (.mo) that programs bring along.

    python scripts/fetch_en_it.py [--install] [--folder DIR] [--catalogues DIR ...]

Reads every Italian catalogue of the system, says which of the packages below are missing, and installs them only if
asked to. Writes en-it.tsv with the columns split, en and it. The sentences keep the licences of their programs (GPL,
LGPL, MPL and others): train on them, do not pass them on.
"""

import argparse
import hashlib
import html
import os
import re
import shutil
import struct
import subprocess
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from fetch_weights import cache_folder

PACKAGES = (
    "libreoffice-l10n-it", "blender-data", "digikam-data", "evolution-common", "gimp-data", "gnucash-common",
    "krita-l10n", "pidgin-data", "vlc-l10n",
)  # fmt: skip
"""Debian packages with large Italian catalogues and few needs; what else is installed is read too."""
PLACES = ("/usr/share", "/usr/lib/libreoffice/program/resource")
LISTS = ("iso_", "iso-", "kstars", "stellarium")
"""Catalogues of names of languages, places and stars, which are no sentences."""
SHORTEST, LONGEST = 3, 20
"""Words of a sentence, in both languages."""
MOST_PLACEHOLDERS = 3
PERCENT = {"test": 2, "val": 2}
"""Share of the sentences that is held out; the rest trains."""


# ---- catalogues ----


def read_catalogue(data: bytes) -> Iterator[tuple[str, str]]:
    """English and Italian of each message of a .mo file, the plural after its singular.

    https://www.gnu.org/software/gettext/manual/html_node/MO-Files.html
    """
    order = {0x950412DE: "<", 0xDE120495: ">"}.get(struct.unpack("<I", data[:4])[0])
    if order is None:
        raise ValueError("no message catalogue")
    count, english_at, italian_at = struct.unpack(f"{order}3I", data[8:20])
    charset = "utf-8"
    for i in range(count):
        messages = []
        for table in (english_at, italian_at):
            length, start = struct.unpack_from(f"{order}2I", data, table + 8 * i)
            messages.append(data[start : start + length])
        if not messages[0]:
            named = re.search(rb"charset=([\w-]+)", messages[1])
            charset = named[1].decode() if named else charset
            continue
        english, italian = (message.decode(charset).split("\0") for message in messages)
        english[0] = english[0].rpartition("\4")[2]  # the context stands before it
        yield from zip(english, italian, strict=False)


def find_catalogues(places: list[Path]) -> list[Path]:
    """Every Italian catalogue under the places that is no list of names."""
    found = {path.resolve() for place in places for path in place.rglob("*.mo") if "it" in path.parts[-3:-1]}
    return sorted(path for path in found if not path.name.startswith(LISTS))


# ---- sentences ----

_TAGS = re.compile(
    r"</?(?:a|b|big|br|center|code|em|emph|filename|font|h[1-6]|html|i|interface|item|li|link|literal|nl|ol|p|para|qt|"
    r"small|span|strong|sub|sup|title|tt|u|ul)(?:\s[^<>]*)?/?>",
    re.IGNORECASE,
)
_PLACEHOLDER = re.compile(
    r"%(?P<position>\d+)\$[-+ #0]*\d*(?:\.\d+)?(?:hh|h|ll|l|z|j|t)?[a-zA-Z]"  # %1$s
    r"|%\((?P<name>\w+)\)[-+#0]*\d*(?:\.\d+)?[a-zA-Z]"  # %(name)s
    r"|%(?P<upper>[A-Z][A-Z0-9_]{2,}%?)"  # %PRODUCTNAME
    r"|%(?P<number>\d+)"  # %1
    r"|%[-+#0]*(?:\*|\d+)?(?:\.(?:\*|\d+))?(?:hh|h|ll|l|z|j|t)?[diouxXeEfgGcsp](?![a-z])"  # %s
    r"|\$\((?P<argument>\w+)\)|\$\{(?P<shell>\w+)\}|\$(?P<word>[A-Za-z_]\w*)"  # $(ARG1), ${name}, $name
    r"|\{(?P<brace>[\w.:!]*)\}"  # {0}
)
_ENTITY = re.compile(r"&(?:amp|lt|gt|quot|apos|nbsp|#\d+);")


def clean(english: str, italian: str) -> tuple[str, str] | None:
    """A pair as it is to be learnt from, or None if it is no sentence and its translation."""
    if re.search(r"\n\s*\n|\n[ \t-]|\t", english.strip("\n")) or english.lstrip()[:1] in "-$#|\\" or "|" in english:
        return None  # paragraphs, tables, options, code
    english, italian = (_plain(text) for text in (english, italian))
    english, italian = _without_mnemonics(english, italian)
    filled = _number_placeholders(english, italian)
    if filled is None:
        return None
    english, italian = filled
    if any(mark in text for text in filled for mark in "<>\\|=`") or english.casefold() == italian.casefold():
        return None
    if not 0.4 < len(english) / max(len(italian), 1) < 2.5 or not all(map(_is_sentence, filled)):
        return None
    return english, italian


def _plain(text: str) -> str:
    """Without markup, on one line, with composed accents and three dots for an ellipsis."""
    text = _TAGS.sub("", text).replace("%PRODUCTNAME", "LibreOffice")
    if _ENTITY.search(text):
        text = html.unescape(text)
    return " ".join(unicodedata.normalize("NFC", text.replace("…", "...")).split())


def _without_mnemonics(english: str, italian: str) -> tuple[str, str]:
    """Without the mark of the key that chooses a menu entry, _ ~ or &, which each text has once; names keep theirs."""
    italian = re.sub(r"\s?\([_~&]\w\)", "", italian)
    for mark in "_~&":
        ours, theirs = (re.findall(rf"\S*{mark}\w\S*", text) for text in (english, italian))
        if len(ours) != 1 or len(theirs) > 1 or (ours == theirs and not ours[0].startswith(mark)):
            continue
        english, italian = (re.sub(rf"{mark}(?=\w)", "", text) for text in (english, italian))
    return english, italian


def _number_placeholders(english: str, italian: str) -> tuple[str, str] | None:
    """Every placeholder as {1}, {2}, ... in the order of the English; None if the two do not hold the same ones."""
    numbers: dict[str, int] = {}
    texts = []
    for text in (english, italian):
        seen: list[str] = []

        def put(found: re.Match[str], seen: list[str] = seen) -> str:
            name = next((value for value in found.groupdict().values() if value), None)
            name = name if name and not found["position"] else f"#{found['position'] or len(seen) + 1}"
            seen.append(name)
            return f"{{{numbers.setdefault(name, len(numbers) + 1)}}}"

        texts.append(_PLACEHOLDER.sub(put, text))
    english, italian = texts
    found = [sorted(re.findall(r"\{\d+\}", text)) for text in texts]
    if found[0] != found[1] or len(found[0]) > MOST_PLACEHOLDERS or "%" in re.sub(r"\d ?%|\{\d+\} ?%", "", english):
        return None
    return english, italian


def _is_sentence(text: str) -> bool:
    """Whether it has as many words as it should, and is made of letters, placeholders apart."""
    words = text.split()
    marks = [c for c in re.sub(r"\{\d+\}", "", text) if not c.isspace()]
    return (
        sum(any(c.isalpha() for c in word) for word in words) >= SHORTEST
        and len(words) <= LONGEST
        and sum(c.isalpha() for c in marks) >= 0.65 * len(marks)
        and max(map(len, words)) <= 30
    )


def key(text: str) -> str:
    """What makes two sentences the same: their letters and digits, but for the placeholders."""
    return "".join(c for c in re.sub(r"\{\d+\}", "", text.casefold()) if c.isalnum())


def part_of(text: str) -> str:
    """The part of a sentence, decided by it alone: it is the same on every machine."""
    place = int.from_bytes(hashlib.sha256(key(text).encode()).digest()[:8], "big") % 100
    for part, percent in PERCENT.items():
        if place < percent:
            return part
        place -= percent
    return "train"


def collect(catalogues: list[Path]) -> tuple[list[tuple[str, str, str]], Counter[str]]:
    """Split, English and Italian of every different English sentence, and how many each catalogue brought.

    Of several translations the most frequent one is taken, and the first in order if there are several of those.
    """
    found: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    brought: Counter[str] = Counter()
    for path in catalogues:
        try:
            messages = list(read_catalogue(path.read_bytes()))
        except (OSError, ValueError, LookupError, struct.error) as error:
            print(f"{path} cannot be read ({error}) and is left out")
            continue
        for english, italian in messages:
            pair = clean(english, italian)
            if pair:
                brought[path.name] += key(pair[0]) not in found
                found[key(pair[0])][pair] += 1
    pairs = [min(choices, key=lambda pair: (-choices[pair], pair)) for choices in found.values()]
    return sorted((part_of(english), english, italian) for english, italian in pairs), brought


# ---- the command ----


def missing_packages() -> list[str]:
    """Those of the packages that are not installed."""
    if shutil.which("dpkg-query") is None:
        return list(PACKAGES)
    command = ["dpkg-query", "--show", "--showformat", "${Package} ${db:Status-Status}\n", *PACKAGES]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return [name for name in PACKAGES if f"{name} installed" not in lines]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="install the missing packages by apt-get")
    parser.add_argument("--folder", type=Path, default=cache_folder())
    parser.add_argument("--catalogues", type=Path, nargs="+", default=[Path(p) for p in PLACES])
    given = parser.parse_args()
    missing = missing_packages()
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
    if missing and given.install:
        for step in (["apt-get", "update"], command):
            quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
            if subprocess.run([*step, "--quiet=2"], check=False, env=quiet).returncode:
                raise SystemExit(
                    f"{' '.join(step)} failed; run it by hand as root, then this script without --install."
                )
    elif missing:
        print(f"missing, so that there will be fewer pairs: {', '.join(missing)}; --install runs {' '.join(command)}")
    pairs, brought = collect(find_catalogues(given.catalogues))
    if not pairs:
        raise SystemExit("no Italian message catalogue was found; install the packages named above, or use --install.")
    given.folder.mkdir(parents=True, exist_ok=True)
    target = given.folder / "en-it.tsv"
    target.write_text("".join("\t".join(row) + "\n" for row in [("split", "en", "it"), *pairs]), encoding="utf-8")
    parts = Counter(part for part, _, _ in pairs)
    counted = ", ".join(f"{part} {parts[part]:,}" for part in ("train", "val", "test"))
    most = ", ".join(f"{name} {count:,}" for name, count in brought.most_common(8))
    print(f"{target}: {len(pairs):,} pairs ({counted}) of {len(brought)} catalogues, most from {most}")


if __name__ == "__main__":
    main()
