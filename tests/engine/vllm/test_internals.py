import re

import pytest
from packaging.version import Version

from tlt_lightning.engine.vllm import internals


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu"])
def test_supported_versions_pass(version: str) -> None:
    internals.check_version(Version(version))


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0"])
def test_other_versions_are_refused_with_the_supported_range(version: str) -> None:
    with pytest.raises(ImportError, match=r">=0\.32\.0,<0\.33\.0"):
        internals.check_version(Version(version))


def test_a_missing_internal_names_itself_and_the_supported_versions() -> None:
    with pytest.raises(RuntimeError, match=r"missing: `moved`.*>=0\.32\.0"):
        internals.reach(internals, "reach.moved")


@pytest.mark.vllm
def test_all_that_is_reached_inside_vllm_is_there() -> None:
    internals.check_required()


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("v1.core.sched.scheduler.Scheduler", "walking"),
        ("v1.core.sched.scheduler.Scheduler", "schedule()"),
        ("v1.core.sched.scheduler.Scheduler", "schedule(throttle)"),
        ("v1.core.sched.scheduler.Planner", "schedule(throttle_prefills)"),
        ("v1.core.plan", "anything"),
    ],
)
def test_a_name_or_a_parameter_that_has_moved_is_named_with_the_supported_versions(place: str, name: str) -> None:
    with pytest.raises(RuntimeError, match=rf"{re.escape(place)}: {re.escape(name)}\. .*>=0\.32\.0"):
        internals.check_required({place: name})
