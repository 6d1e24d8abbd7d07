"""What several test files share."""

import pytest
from broken.scale import SPEC

from harness import spec


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
