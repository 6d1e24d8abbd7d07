"""What the documents say is so: times are of the committed baseline, the example passes."""

import json
import re
from collections import Counter
from pathlib import Path

from throwaway import Project

from harness import certificates

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


def test_the_kernel_in_contributing_passes_and_can_fail(tmp_path):
    text = (ROOT / "CONTRIBUTING.md").read_text()
    blocks = dict(re.findall(r"^`(\w+/[\w/.]+)`,.*?^```\w+\n(.*?)^```", text, re.M | re.S))
    spec = blocks["specs/softcap.toml"]
    spec = spec.replace("goldens.softcap", "mine.softcap_oracle")  # not into the packages
    spec = spec.replace("engine.kernels.softcap", "mine.softcap")
    project = Project(tmp_path)
    project.write("specs/softcap.toml", spec)
    project.write("mine/softcap_oracle.py", blocks["goldens/softcap.py"])
    project.write("mine/softcap.py", blocks["engine/kernels/softcap.py"])
    done = project.gate("--spec", "softcap")
    assert done.returncode == 0, done.stdout
    done = project.kdtr("mutate", "--spec", "softcap", "-n", "1")
    assert done.returncode == 0, done.stdout
    assert "CERTIFIED softcap" in done.stdout


def test_mutants_told_are_those_of_the_certificates():
    found = Counter(
        row["outcome"]
        for path in (ROOT / "ci" / "certificates").glob("*.json")
        for row in json.loads(path.read_text())["mutants"]
    )
    text = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    told = re.search(
        r"of (\d+) mutants that change something (\d+) died in the simulator, and (\d+) are for a"
        r" GPU .*?; (\d+) more are explained as changing nothing, (\d+) did not compile",
        text,
    )
    dead, for_a_gpu = found[certificates.KILLED], found[certificates.FOR_A_GPU]
    same, refused = found[certificates.EQUIVALENT], found[certificates.INVALID]
    counts = (dead + for_a_gpu, dead, for_a_gpu, same, refused)
    assert told
    assert tuple(map(int, told.groups())) == counts
