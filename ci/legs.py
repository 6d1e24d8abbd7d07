"""What the runs of ci/many_gpus.py saw: which case ran where, idle GPUs, what differs."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness import report


@dataclass
class Leg:
    """One run of the gate: on which GPUs, how long, and its report."""

    name: str
    gpus: list[str]
    seconds: float = 0.0
    done: bool = False
    found: dict[str, Any] = field(default_factory=dict)  # report.json
    used: dict[str, float] = field(default_factory=dict)  # UUID -> mean utilisation, sampled

    @property
    def cases(self) -> list[dict[str, Any]]:
        return self.found.get("cases", [])

    @property
    def ran_on(self) -> dict[str, list[str]]:
        return self.found.get("context", {}).get("ran_on", {})

    def idle(self) -> dict[str, float]:
        """UUID -> share of the leg in which no case that needs a GPU ran on it."""
        seconds = self.found.get("context", {}).get("seconds", {})
        busy = dict.fromkeys(self.gpus, 0.0)
        for case in self.cases:
            if case["stage"] != "golden":
                for uuid in self.ran_on.get(case["id"], []):
                    busy[uuid] = busy.get(uuid, 0.0) + seconds.get(case["id"], 0.0)
        whole = max(self.seconds, 1e-9)  # workers that share a GPU are busy while they wait for it
        return {uuid: round(max(0.0, 1 - busy[uuid] / whole), 3) for uuid in self.gpus}

    def as_json(self) -> dict[str, Any]:
        bad = [f"{c['id']} {c['status']}" for c in self.cases if not c["ok"]]
        return {
            "name": self.name, "gpus": self.gpus, "seconds": round(self.seconds, 1),
            "done": self.done, "cases": len(self.cases), "failed": bad, "idle": self.idle(),
            "used": self.used, "ran_on": self.ran_on,
        }  # fmt: skip


class Sampler:
    """What nvidia-smi says of each GPU twice a second; nothing where there is no nvidia-smi."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, str, float]] = []  # time, UUID, percent
        query = ["nvidia-smi", "--query-gpu=uuid,utilization.gpu"]
        query += ["--format=csv,noheader,nounits", "-lms", "500"]
        try:
            self.process: Any = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
        except OSError:
            self.process = None
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            uuid, _, percent = line.partition(",")
            if percent.strip().isdigit():
                self.samples.append((time.monotonic(), uuid.strip(), float(percent)))

    def mean(self, since: float, until: float, uuids: Iterable[str]) -> dict[str, float]:
        """UUID -> mean utilisation in percent."""
        means = {}
        for uuid in uuids:
            seen = [p for t, u, p in self.samples if u == uuid and since <= t <= until]
            if seen:
                means[uuid] = round(sum(seen) / len(seen), 1)
        return means

    def close(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()


def differences(legs: Sequence[Leg]) -> tuple[list[str], int]:
    """Cases whose verdict or bits differ between GPUs, in words; how many ran on several. The run
    in which a worker is killed tells nothing about verdicts."""
    seen: dict[str, dict[tuple, list[str]]] = {}
    for leg in legs:
        for case in leg.cases:
            lost = leg.name == "killed" and case["status"] == report.Status.CRASHED
            if lost or case["stage"] == "golden":
                continue
            made = tuple((each["output"], each.get("bits", "")) for each in case["outputs"])
            where = "+".join(leg.ran_on.get(case["id"], ["?"]))
            seen.setdefault(case["id"], {}).setdefault((case["status"], made), []).append(where)
    several = sum(len({w for where in made.values() for w in where}) > 1 for made in seen.values())
    unlike = []
    for name, found in sorted(seen.items()):
        if len(found) > 1:
            told = "; ".join(
                f"{status} {dict(made)} on {', '.join(sorted(set(where)))}"
                for (status, made), where in found.items()
            )
            unlike.append(f"{name} differs: {told}")
    return unlike, several


def markdown(found: Mapping[str, Any], name: str) -> str:
    """The section for the README."""
    count, problems = len(found["legs"][0]["gpus"]) if found["legs"] else 0, found["problems"]
    count = max((len(leg["gpus"]) for leg in found["legs"]), default=count)
    what = f"specs {', '.join(found['subset'])}" if found["subset"] else "the whole gate"
    lines = [
        f"### The gate on {count} GPUs of one machine",
        "",
        f"{count} x {name}, {found['cores']} cores, `python -m ci.many_gpus --gpus {count}`, "
        f"{found['seconds']:.0f} s in all; compiling and goldens before the first run took "
        f"{found['steps'].get('prepare', 0):.0f} s. The runs compared: {what}.",
        "",
        "| run | GPUs | seconds | cases | not passed | idle share of each GPU | use (nvidia-smi) |",
        "|---|---|---|---|---|---|---|",
    ]
    for leg in found["legs"]:
        idle = ", ".join(f"{share:.0%}" for share in leg["idle"].values())
        used = ", ".join(f"{mean:.0f}%" for mean in leg["used"].values())
        cut = "" if leg["done"] else " (interrupted)"
        lines.append(
            f"| {leg['name']} | {len(leg['gpus'])} | {leg['seconds']:.1f}{cut} | {leg['cases']} | "
            f"{len(leg['failed'])} | {idle} | {used} |"
        )
    shares = []
    for leg in found["legs"]:
        cases: dict[str, int] = {}
        for uuids in leg["ran_on"].values():
            where = "+".join(uuid.removeprefix("GPU-")[:8] for uuid in uuids) or "host"
            cases[where] = cases.get(where, 0) + 1
        shares.append(f"{leg['name']}: " + ", ".join(f"{w} {n}" for w, n in sorted(cases.items())))
    lines += ["", "Cases by GPU: " + "; ".join(shares) + ".", ""]
    lines.append(
        f"{found['cases_on_several_gpus']} cases ran on more than one GPU; "
        f"{sum('differs' in p for p in problems)} differed in verdict or bits."
    )
    if kill := found["killed"]:
        lines += [
            "",
            f"A worker was killed in the middle of {kill['case']}: its verdict is "
            f"{kill['status']}, and its replacement ran {kill['cases_of_the_replacement']} cases "
            + ("on the same GPU." if kill["replacement_on_the_same_gpu"] else "ELSEWHERE."),
        ]
    if found["ranks"]:
        lines += ["", "| K2.6 MoE layer | T | us | bits |", "|---|---|---|---|"]
        for row in found["ranks"]:
            bits = "as one GPU" if row["bits_of_one_gpu"] else "DIFFER"
            lines.append(f"| {row['on']} | {row['nodes']} | {row['us']:.1f} | {bits} |")
    if problems:
        lines += ["", "Not as it should be:", *(f"- {problem}" for problem in problems)]
    return "\n".join(lines) + "\n"
