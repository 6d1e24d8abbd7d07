"""The drift runs: what is set is in use, and a run in which it is not fails."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ci import drift, drift_says


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the names are those of x86-64 CPUs")
@pytest.mark.parametrize("core", ["Nehalem", "Haswell"])
def test_openblas_says_what_was_set(core):
    setting = {"OPENBLAS_NUM_THREADS": "2", "OPENBLAS_CORETYPE": core}
    environ = drift.surroundings(drift.ROOT / "nowhere", setting)
    said = drift.inside(["-m", "ci.drift_says"], environ).stdout
    if "no OpenBLAS" in said:
        pytest.skip("this numpy has another BLAS")
    assert said.strip().endswith(f"OpenBLAS {core}, 2 threads")


def test_it_says_the_version_and_what_it_found():
    said = f"numpy 2.4.6 {drift_says.avx512()}, OpenBLAS {drift_says.openblas()}"
    assert "AVX-512" in said


@pytest.mark.parametrize(
    ("says", "code", "failed"),
    [
        ("numpy 2.1.3 without AVX-512, OpenBLAS {core}, {threads}", 0, 0),
        ("numpy 2.1.3 with AVX-512, OpenBLAS {core}, {threads}", 0, 1),  # of the one without
        ("numpy 2.4.6 without AVX-512, OpenBLAS {core}, {threads}", 0, 4),
        ("numpy 2.1.3 without AVX-512, OpenBLAS SkylakeX, {threads}", 0, 2),
        ("numpy 2.1.3 without AVX-512, OpenBLAS {core}, 64 threads", 0, 4),
        ("numpy 2.1.3 without AVX-512, OpenBLAS {core}, {threads}", 1, 4),
    ],
)
def test_a_run_counts_only_if_its_setting_is_in_use(monkeypatch, capsys, says, code, failed):
    def inside(arguments, environ):
        threads = environ["OPENBLAS_NUM_THREADS"]
        text = says.format(
            core=environ.get("OPENBLAS_CORETYPE", "SkylakeX"),
            threads="1 thread" if threads == "1" else f"{threads} threads",
        )
        told = "ci.drift_says" in arguments
        out = text if told else "9 cases of 1 specs, 0 differences"
        return subprocess.CompletedProcess(arguments, 0 if told else code, out, "")

    monkeypatch.setattr(drift, "inside", inside)
    monkeypatch.setattr(drift.subprocess, "run", lambda *_, **__: None)  # pip
    assert drift.main(["--numpy", "2.1", "rms_norm"]) == (1 if failed else 0)
    assert capsys.readouterr().out.count("FAILED") == failed
