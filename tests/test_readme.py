"""The README's times are those of the committed baseline."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"\| [^|]+ \| `(\w+)::(\w+)` \| ([\d.]+) \| ([^|]+) \|")


def as_printed(number: float, like: str) -> str:
    return f"{number:.{len(like.partition('.')[2])}f}"


def test_times_and_peers_are_rows_of_the_baseline():
    baseline = json.loads((ROOT / "ci" / "baselines" / "h200.json").read_text())
    rows = ROW.findall((ROOT / "README.md").read_text())
    assert len(rows) >= 8
    for spec, case, time_us, peers in rows:
        kept = baseline[f"specs/{spec}.toml::{case}"]
        assert as_printed(kept["time_us"], time_us) == time_us, case
        theirs = [t for t in kept["peers"].values() if isinstance(t, float)]
        for told in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?!\d|\))", peers.partition("(")[0]):
            assert told in {as_printed(t, told) for t in theirs}, f"{case}: {told}"
