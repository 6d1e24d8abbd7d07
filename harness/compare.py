"""Is what came out what had to come out? One Result an output."""

from harness.golden import Golden
from harness.report import Result
from harness.run import Actual
from harness.spec import Case, Spec


def compare(spec: Spec, case: Case, golden: Golden, actual: Actual) -> list[Result]:
    raise NotImplementedError
