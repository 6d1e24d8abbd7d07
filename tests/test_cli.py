"""kdtr as it is typed: help, wrong calls, commands of other modules, doctor."""

import subprocess
import sys

import pytest
import typer
from throwaway import Project

from harness import cli, devices, doctor


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def test_help_shows_every_command_and_imports_no_numba(project):
    done = project.kdtr("--help")
    assert done.returncode == 0
    for command in ("gate", "golden", "doctor", "compile", "report"):
        assert f" {command} " in done.stdout
    program = "import sys, harness.cli; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("call", "code", "said"),
    [
        ("gate --spec twise", 2, "no spec 'twise'; there is twice"),
        ("gate --spec twice --case odder", 2, "no case 'odder'; there is odd"),
        ("gate --kernel mine.twice:wrong", 2, "say which with --spec NAME"),
        ("gate --shard 4/3", 2, "a shard is I/N"),
        ("gate -n ²", 2, "-n takes a number or auto, got '²'"),
        ("gate -n many", 2, "-n takes a number or auto, got 'many'"),
        ("gate --receipt --device sim", 2, "--receipt is evidence from a GPU"),
        ("gate --device sim --case big", 1, "cannot run here (asked for): specs/twice.toml::big"),
        ("gate --device gpu", 2, "gpu"),
        ("gate --stage kernal", 2, "kernal"),
        ("golden generate", 2, "a golden changes only for a reason"),
        ("golden verify nothing", 2, "no spec 'nothing'"),
        ("report merge gone", 1, "gone: not a report"),
        ("bundle make tiny-int4 --out specs", 1, "specs: is a directory"),
        ("frobnicate", 2, "frobnicate"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(project, call, code, said):
    done = project.kdtr(*call.split())
    assert said in done.stdout
    assert "Traceback" not in done.stdout
    assert done.returncode == code


def test_a_folder_without_specs_is_no_pass(project):
    (project.folder / "specs" / "twice.toml").unlink()
    done = project.kdtr("gate")
    assert done.returncode == 2
    assert "no specs/*.toml in" in done.stdout


def test_goldens_are_verified_against_the_manifest(project):
    assert project.kdtr("golden", "verify").returncode == 1  # there is no manifest yet
    made = project.kdtr("golden", "generate", "--reason", "first")
    assert made.returncode == 0, made.stdout
    done = project.kdtr("golden", "verify")
    assert done.returncode == 0, done.stdout
    assert "3 cases of 1 specs, 0 differences" in done.stdout


# -- commands of other modules ---------------------------------------------------------------------


@pytest.fixture
def other(monkeypatch, tmp_path):
    """Mounts the command `name` of a module with this source; returns what `kdtr` then says."""

    def mounted(source, name, *arguments):
        (tmp_path / "other.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(cli, "app", typer.Typer())
        monkeypatch.delitem(sys.modules, "other", raising=False)
        cli.app.command("first")(lambda: None)
        cli.mount(name, "other:app", "help")
        from typer.testing import CliRunner

        return CliRunner().invoke(cli.app, [name, *arguments])

    return mounted


HEAD = "import typer\napp = typer.Typer()\n"
ECHO = "@app.command({})\ndef {}(word: str):\n    print('said', word)\n"


def test_a_module_with_one_command_gives_it(other):
    assert "said hi" in other(HEAD + ECHO.format("", "main"), "bench", "hi").output


def test_a_module_with_many_gives_the_one_of_that_name(other):
    source = HEAD + ECHO.format("", "bundle") + ECHO.format("'import'", "import_")
    assert "said hi" in other(source, "import", "hi").output


def test_a_module_with_many_is_a_group_of_its_own_otherwise(other):
    source = HEAD + ECHO.format("", "one") + ECHO.format("", "two")
    assert "said hi" in other(source, "bundle", "two", "hi").output


def test_a_missing_module_takes_no_other_command_away(monkeypatch, capsys):
    monkeypatch.setattr(cli, "ELSEWHERE", (("gone", "no_such_package.module:app", "x"),))
    monkeypatch.setattr(cli, "app", typer.Typer())
    cli.app.command("first")(lambda: print("first ran"))
    monkeypatch.setattr(sys, "argv", ["kdtr"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 0
    assert "first ran" in capsys.readouterr().out


# -- doctor ----------------------------------------------------------------------------------------

GOOD = {
    "numpy": "2.4.6",
    "numba-cuda": "0.30.4",
    "nvidia-nvjitlink": "13.0.88",
    "nvidia-nvvm": "13.0.88",
}


def test_good_versions_have_nothing_against_them():
    assert doctor.pairs(GOOD) == []


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"numpy": "2.5.0"}, "pip install 'numpy<2.5'"),
        ({"nvidia-nvjitlink": "13.5.1"}, r"pip install 'nvidia-nvjitlink==13.0.*'"),
    ],
)
def test_a_known_bad_pair_comes_with_its_remedy(change, remedy):
    (finding,) = doctor.pairs(GOOD | change)
    assert finding.level == doctor.BAD
    assert remedy in finding.so


def test_the_doctor_names_gpus_by_uuid_and_what_follows(monkeypatch):
    monkeypatch.setenv(devices.FAKE, "GPU-a,GPU-b:bad,GPU-c")
    monkeypatch.setenv(devices.VISIBLE, "GPU-a,GPU-b")
    said = "\n".join(map(str, doctor.gpus()))
    assert "ok    GPU-a Fake" in said
    assert "GPU-b Fake, compute capability 9.0, driver 0\n      fails its self-test" in said
    assert "GPU-c Fake, compute capability 9.0, driver 0\n      hidden by CUDA_VISIBLE" in said


def test_a_missing_package_is_bad(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: "" if name == "greenlet" else "1.0")
    assert any(f.level == doctor.BAD and "greenlet" in f.text for f in doctor.examine())


def test_the_doctor_passes_here(project):
    done = project.kdtr("doctor")
    assert done.returncode == 0, done.stdout
    assert "kdtr gate runs" in done.stdout


def test_receipts_counts_what_is_proven_and_names_what_is_not(project):
    done = project.kdtr("receipts")
    assert done.returncode == 0, done.stdout
    assert "certificates: 1 specs, 1 MISSING" in done.stdout
    done = project.kdtr("receipts", "--gpu", "h200")
    assert "receipts of h200" in done.stdout
    assert "missing: 3\n  twice.toml: " in done.stdout
