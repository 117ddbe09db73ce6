"""Commands of the documentation, run on the demo as a reader would type them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from e2e.command_blocks import REPOSITORY, blocks, run
from e2e.product.install import DEMO_NAMESPACE, unsettled
from e2e.product.kubectl import Kubectl, wait_until

pytestmark = pytest.mark.cluster

TUTORIAL = "docs/tutorial/first-tenant.md"
PAGES = (
    pytest.param(TUTORIAL, marks=pytest.mark.claim("the tutorial's commands succeed, with the outputs that it shows")),
    "docs/how-to/policies.md",
    "docs/operations/troubleshooting.md",
    "docs/operations/install.md",
)
HERE = Path(__file__).resolve().relative_to(REPOSITORY).as_posix()
AS_TYPED = """
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
sleep() { command sleep $((3 * $1)); }
"""
"""Before a page's commands: their background processes end with them, and a machine may be slower than a reader."""
ENFORCED = re.compile(r"^initech .* 2/2 +True +AllPodsAcknowledged", re.M)
ERASED = re.compile(r"^erase-initech-\S+ +tenant/initech +Eager .* True +ErasedAndVerified", re.M)
MANIFEST = re.compile(r"```yaml\n(apiVersion:.*?)```", re.S)


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_succeed(kubectl: Kubectl, tmp_path: Path, page: str) -> None:
    commands = [block.text for block in blocks(REPOSITORY / page) if block.test == HERE]
    assert commands
    keys = kubectl.get("secret", "tiny-api-keys", DEMO_NAMESPACE)
    if first := MANIFEST.search((REPOSITORY / page).read_text()):
        (tmp_path / "initech.yaml").write_text(first[1])
    script = "\n".join((AS_TYPED, *commands))
    try:
        output = run(script, tmp_path, kubectl.environment)
        if page == TUTORIAL:
            fresh, again, other = re.findall(r"cached_tokens: (.*)", output)
            assert [bool(re.search(r"[1-9]", text)) for text in (fresh, again, other)] == [False, True, False], output
            assert ENFORCED.search(output), output
            assert ERASED.search(output), output
    finally:
        kubectl.apply({**keys, "metadata": {"name": keys["metadata"]["name"], "namespace": DEMO_NAMESPACE}})
        kubectl.run("-n", DEMO_NAMESPACE, "delete", "tenantcachepolicy", "initech", "--ignore-not-found")
        wait_until("the samples are ready and enforced again", lambda: not unsettled(kubectl), every_s=1)
