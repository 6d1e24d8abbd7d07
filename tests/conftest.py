"""What several test files share."""

import pytest
from broken.scale import SPEC

from harness import devices, spec


@pytest.hookimpl(wrapper=True)
def pytest_xdist_auto_num_workers():
    """Half as many again in place of one a core: many tests wait for processes of their own."""
    count = yield
    return count * 3 // 2 if count == devices.cores() else count


@pytest.fixture
def load(tmp_path):
    """load((old, new), ...) reads the spec of broken.scale with text replaced."""

    def load(*changes, name="scale"):
        text = SPEC
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "specs" / f"{name}.toml"
        path.parent.mkdir(exist_ok=True)
        (tmp_path / "goldens").mkdir(exist_ok=True)
        path.write_text(text)
        return spec.load(path)

    return load
