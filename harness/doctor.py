"""What is on this machine, and what follows from it for the gate."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from importlib import metadata

from harness import devices

OK, NOTE, BAD = "ok", "note", "bad"
PACKAGES = ("numba", "numba-cuda", "numpy", "ml_dtypes", "safetensors", "greenlet", "pytest")


@dataclass(frozen=True)
class Finding:
    """`level` is ok, note or bad; `text` what was found; `so` what follows, if anything."""

    level: str
    text: str
    so: str = ""

    def __str__(self) -> str:
        return f"{self.level:<5} {self.text}" + (f"\n      {self.so}" if self.so else "")


def examine() -> list[Finding]:
    """Everything worth knowing, the device that a run would use last."""
    installed = {name: version(name) for name in (*PACKAGES, *devices.WHEELS)}
    findings = [Finding(OK, f"Python {platform.python_version()} on {platform.machine()}")]
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        findings = [Finding(BAD, findings[0].text, "this needs Python 3.11, 3.12 or 3.13")]
    for name in PACKAGES:
        if installed[name]:
            findings.append(Finding(OK, f"{name} {installed[name]}"))
        else:
            findings.append(Finding(BAD, f"{name} is not installed", "pip install kdtree-engine"))
    findings += pairs(installed)
    findings += gpus()
    return findings


def version(name: str) -> str:
    """The installed version of a distribution, "" if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def pairs(installed: dict[str, str]) -> list[Finding]:
    """Versions that are known not to work together."""
    found = []
    if _at_least(installed["numpy"], 2, 5) and installed["numba-cuda"].startswith("0.30."):
        found.append(
            Finding(
                BAD,
                f"numpy {installed['numpy']} with numba-cuda {installed['numba-cuda']}",
                "the first compile fails: pip install 'numpy<2.5'",
            )
        )
    linker, compiler = installed["nvidia-nvjitlink"], installed["nvidia-nvvm"]
    if linker and compiler and _key(linker)[:2] > _key(compiler)[:2]:
        found.append(
            Finding(
                BAD,
                f"nvjitlink {linker} is newer than the toolkit's nvvm {compiler}",
                f"a driver of the toolkit's age cannot load what it links: "
                f"pip install 'nvidia-nvjitlink=={'.'.join(compiler.split('.')[:2])}.*'",
            )
        )
    return found


def gpus() -> list[Finding]:
    """The GPUs by UUID, the driver and the toolkit, and which device `auto` means here."""
    found = []
    machine = devices.survey()
    visible = devices.narrow(machine.gpus, os.environ.get(devices.VISIBLE))
    for gpu in machine.gpus:
        text = f"{gpu.uuid} {gpu.name}, compute capability {gpu.compute}"
        text += f", {gpu.memory / 2**30:.0f} GiB" if gpu.memory else ""
        text += f", driver {gpu.driver}" if gpu.driver else ""
        if gpu not in visible:
            found.append(Finding(NOTE, text, f"hidden by {devices.VISIBLE}: no run will use it"))
        elif problem := devices.self_test(gpu):
            found.append(
                Finding(NOTE, text, f"fails its self-test and would be left out: {problem}")
            )
        else:
            found.append(Finding(OK, text))
    where = devices.toolkit()
    if where:
        found.append(Finding(OK, f"CUDA toolkit: {where}"))
    else:
        found.append(
            Finding(
                NOTE,
                "no CUDA toolkit",
                "no GPU run and no kdtr compile: pip install 'kdtree-engine[cu13]'",
            )
        )
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
        found.append(Finding(NOTE, "NUMBA_ENABLE_CUDASIM is set", "--device auto is the simulator"))
    choice = devices.choose("auto")
    if choice.device == "cuda":
        found.append(Finding(OK, f"kdtr gate runs on {len(choice.gpus)} GPUs, one worker each"))
    else:
        so = f"{choice.why}; only cases with sim = true run, the others need a receipt"
        found.append(Finding(NOTE, "kdtr gate runs in the simulator", so))
    return found


def _key(text: str) -> list[int]:
    return [int(part) for part in text.split(".") if part.isdecimal()]


def _at_least(text: str, *least: int) -> bool:
    return bool(text) and _key(text)[: len(least)] >= list(least)
