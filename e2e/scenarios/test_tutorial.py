"""The tutorial, from `helm install` to nothing left, as a reader would type it.

It is a second release beside the demo's, with names of its own: the demo's objects need the kinds, so their removal is
a dry run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from e2e.command_blocks import AS_TYPED, REPOSITORY, blocks, run
from e2e.product.install import MINIMAL
from e2e.product.kubectl import Kubectl

pytestmark = pytest.mark.cluster

PAGE = REPOSITORY / "docs/tutorial/first-tenant.md"
HERE = Path(__file__).resolve().relative_to(REPOSITORY).as_posix()
NAMESPACE, OPERATOR = "tutorial", "tutorial-system"
FIRST_HIT_WITHIN_S = 600
KINDS = 7

OWN_NAMES = {
    "--install kvstrata charts": "--install tutorial charts",
    "uninstall kvstrata -n": "uninstall tutorial -n",
    "instance=kvstrata": "instance=tutorial",
    "kvstrata-system": OPERATOR,
    "team-a": NAMESPACE,
    "uninstall kvstrata-crds": "uninstall kvstrata-crds --dry-run",
    "part-of=kvstrata": "part-of=kvstrata --dry-run=server -o name",
}
"""Differences from the page."""
ASKED = re.compile(r"^(\d+) tokens, cached: (\d+)$", re.M)
TIMED = re.compile(r"^block (\d+) ended after (\d+) s$", re.M)


@pytest.fixture
def minimal(kubectl: Kubectl, tmp_path: Path) -> Iterator[Path]:
    """The sample, in this story's namespace. Afterwards nothing of the release is left, also after a failure."""
    path = tmp_path / "minimal.yaml"
    path.write_text(MINIMAL.read_text().replace("team-a", NAMESPACE))
    with ExitStack() as afterwards:
        gone = ("--ignore-not-found", "--timeout=240s")
        afterwards.callback(kubectl.run, "delete", "namespace", OPERATOR, *gone)
        afterwards.callback(kubectl.helm, "uninstall", "tutorial", "-n", OPERATOR, "--ignore-not-found")
        # First: it ends while the operator is there, without which the uninstall is refused.
        afterwards.callback(kubectl.run, "delete", "namespace", NAMESPACE, *gone)
        yield path


@pytest.mark.claim("two objects and a key lead to the first hit within ten minutes, and nothing of the release is left")
def test_the_tutorial_leads_to_a_hit_in_ten_minutes_and_leaves_nothing(kubectl: Kubectl, minimal: Path) -> None:
    commands = [block.text for block in blocks(PAGE) if block.test == HERE]
    steps = [f"{text}\necho block {number} ended after $SECONDS s" for number, text in enumerate(commands, start=1)]
    script = "\n".join((AS_TYPED, *steps))
    for old, new in {**OWN_NAMES, "manifests/samples/minimal.yaml": str(minimal)}.items():
        assert old in script, f"{PAGE.name} has no {old!r}"
        script = script.replace(old, new)
    output = run(script, REPOSITORY, kubectl.environment)
    ended_s = {int(number): int(seconds) for number, seconds in TIMED.findall(output)}
    print(f"the first hit came {ended_s[4]} s after the first command, all was removed after {ended_s[8]} s")

    prompts, cached = zip(*((int(tokens), int(found)) for tokens, found in ASKED.findall(output)), strict=True)
    assert len(set(prompts)) == 1, output
    assert cached[1] > prompts[0] // 2, output
    assert (cached[0], *cached[2:]) == (0, 0, 0), output
    assert ended_s[4] < FIRST_HIT_WITHIN_S, output
    assert "no TenantCachePolicy of namespace tutorial is for tenant globex" in output
    assert '"tiers":["smollm2"]' in output
    assert "ErasedAndVerified" in output
    assert output.count("customresourcedefinition.apiextensions.k8s.io/") == KINDS, output
    # The last commands search for remains.
    assert not output.partition("block 7 ended")[2].splitlines()[1:-1], output
