"""Which files a verdict depends on, and their digest: so that a receipt knows when it is stale."""

from harness.spec import Spec


def digest(spec: Spec) -> str:
    """sha256 over the spec file and every project file that its oracle and kernel import."""
    raise NotImplementedError
