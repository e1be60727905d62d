"""Habits of prose that make the documentation hard to read, found by regular expressions: ``make lint`` runs this.

CONTRIBUTING.md has the style guide. Code, links, quoted output and pages that programs write are left alone.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
WRITTEN = ("docs/results/", "docs/performance.md", "docs/_build/", "docs/reference/generated/")
"""Pages that programs write: their words are those of the programs."""
OURS = ("docs/results/README.md", "docs/results/verdict.md", "docs/results/tables.md")

HABITS = {
    r"\b(?:is|are|was|were) refused\b": 'active: "dssl rejects ...", or "... is an error"',
    r"\brefuses? to exist\b": '"raises DsslError"',
    r"\bequal work\b": '"equal compute"',
    r"\bbeside\b": '"next to", "compared with" or "while ... runs"',
    r"\bcannot be told\b": '"inconclusive" or "not distinguishable"',
    r"\b(?:within|beyond) chance\b": '"(not) significant"',
    r"\b(?:wholly|partly)\b": '"fully", "partially"',
    r"\bis no file\b": '"does not exist"',
    r"\bstands there\b": '"is there"',
    r"\bone's own\b": '"your own"',
    r"\b(?:a|one) line says\b|\bsays so in one line\b": "quote the message, or leave it out",
    r"\bhas \d\d\.\d\b": '"scores 52.9"',
    r"\d %": '"5%", without a space',
    r"\b(?:learnt|towers?|health looks?)\b": '"learned", "layer", "health check"',
    r"\b(?:Whether|Where|That) [^.]*; (?:whether|where|that)\b": "two sentences",
}


def prose(text: str) -> list[str]:
    """The lines of a page, with code blocks and code empty, so that the numbers of lines stay."""
    text = re.sub(r"^( *)```.*?^\1```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", "", text)
    return re.sub(r"\]\([^)]*\)", "]", text).splitlines()


def pages() -> list[Path]:
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    names = {path: path.relative_to(ROOT).as_posix() for path in found}
    return sorted(path for path, name in names.items() if name in OURS or not name.startswith(WRITTEN))


def main() -> int:
    found = 0
    for page in pages():
        for number, line in enumerate(prose(page.read_text(encoding="utf-8")), 1):
            for habit, instead in HABITS.items():
                for match in re.finditer(habit, line):
                    found += 1
                    print(f"{page.relative_to(ROOT)}:{number}: {match[0]!r}: write {instead}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
