"""Commands of the documentation, run on the demo as a reader would type them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from e2e.command_blocks import AS_TYPED, REPOSITORY, blocks, run
from e2e.product.chapters import ACME_KEY, Stage
from e2e.product.install import DEMO_NAMESPACE, unsettled
from e2e.product.kubectl import Kubectl, wait_until
from e2e.product.prompts import fresh_prompt

pytestmark = pytest.mark.cluster

SIZE, REPORT = "docs/how-to/size.md", "docs/how-to/report.md"
PAGES = {
    "docs/how-to/callers.md": (),
    "docs/how-to/policies.md": (),
    "docs/operations/troubleshooting.md": (),
    "docs/operations/install.md": (),
    # SmolLM2-135M in float32: 2 * 30 layers * 3 KV heads * 64 * 4 bytes.
    SIZE: (r"KV of a token in tiers +46,080 ", r"^\S+ +\S+ +[0-9.]+ [KMG]iB +[0-9,]+ .* declared$"),
    REPORT: (r'"total">[1-9][0-9.]* %</span> of all prompt tokens came from a cache',),
}
"""Pages of the documentation, with patterns that the output of their commands, or the file that they write, has."""

CLAIMS = {
    SIZE: "size computes the bytes of a token of a running cluster's model",
    REPORT: "report shows the share of a running cluster's prompt tokens that came from a cache",
}
HERE = Path(__file__).resolve().relative_to(REPOSITORY).as_posix()


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.claim(CLAIMS[page])] if page in CLAIMS else []) for page in PAGES],
)
def test_the_commands_of_a_page_succeed(kubectl: Kubectl, stage: Stage, tmp_path: Path, page: str) -> None:
    commands = [block.text for block in blocks(REPOSITORY / page) if block.test == HERE]
    assert commands
    # There is something to report: an engine finds blocks that it has computed itself.
    prompt = fresh_prompt()
    assert [stage.first.found(ACME_KEY, prompt) > 0 for _ in range(2)] == [False, True]
    keys = kubectl.get("secret", "smollm2-api-keys", DEMO_NAMESPACE)
    script = "\n".join((AS_TYPED, *commands))
    try:
        output = run(script, tmp_path, kubectl.environment)
    finally:
        kubectl.apply({**keys, "metadata": {"name": keys["metadata"]["name"], "namespace": DEMO_NAMESPACE}})
        wait_until("the samples are ready and enforced again", lambda: not unsettled(kubectl), every_s=1)
    output += "".join(written.read_text() for written in tmp_path.glob("*.html"))
    for printed in PAGES[page]:
        assert re.search(printed, output, re.M), f"no {printed!r} in:\n{output}"
