"""Writes the table of recorded verdicts into README.md, between its two markers.

``python docs/readme_table.py`` rewrites the file, ``--check`` only says whether it is up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gen_pages import RESULTS, asked, cell, day, effect, recorded_results, table

from practicum.catalog import Card, Catalog
from practicum.checks.results import Result
from practicum.checks.words import MISSING, plural

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- recorded verdicts: begin -->", "<!-- recorded verdicts: end -->"


def verdicts(cards: Sequence[Card], results: Path) -> str:
    """Write the claims of every method with the verdicts of its largest recorded scale."""
    rows: list[tuple[str, ...]] = []
    sources: list[str] = []
    for card in cards:
        recorded = recorded_results(card.name, results)[:1]
        if not recorded:
            rows += [(f"`{card.name}`", cell(claim.text), "", "", "not recorded yet") for claim in card.claims]
        for result in recorded:
            rows += claims(result)
            sources.append(f"`{card.name}`: {result.scale} scale, {plural(len(result.seeds), 'seed')}, {day(result)}")
    head = ("Method", "Claim", "Stated beforehand", "Measured (95 % interval)", "Verdict")
    return "\n\n".join([table(head, rows), *([f"{'; '.join(sources)}."] if sources else [])])


def claims(result: Result) -> list[tuple[str, ...]]:
    """One row for each claim of a result."""
    return [
        (
            f"`{result.method}`",
            cell(claim.text),
            asked(claim),
            effect(claim) if claim.effect is not None else cell(claim.reason) or MISSING,
            f"**{claim.verdict}**",
        )
        for claim in result.claims
    ]


def updated(readme: str, block: str) -> str:
    """Return the README with the block between its markers.

    Raises
    ------
    ValueError
        When a marker is missing or stands there twice.
    """
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"README.md must have the lines {BEGIN} and {END} once each")
    before, _, rest = readme.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{block}\n\n{END}{after}"


def main(arguments: Sequence[str]) -> int:
    """Rewrite the README, or check it."""
    now = README.read_text(encoding="utf-8")
    wanted = updated(now, verdicts(list(Catalog()), RESULTS))
    if "--check" in arguments:
        if now != wanted:
            print("README.md is not up to date with results/: run python docs/readme_table.py", file=sys.stderr)
        return int(now != wanted)
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
