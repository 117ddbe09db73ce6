"""The manifests in the documentation are read by the same models as the cluster's objects."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstrata.api import KINDS
from kvstrata_sidecar.gate.policy.api_keys import KEYS_DATA_KEY, KeyRing

REPOSITORY = Path(__file__).resolve().parents[3]
PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md")))
SNIPPET = re.compile(r"^( *)```yaml\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
OTHERS = ("admissionregistration.k8s.io/", "cert-manager.io/", "monitoring.coreos.com/", "keda.sh/")
"""What other projects' manifests begin with."""

BY_KIND = {kind.INFO.kind: kind for kind in KINDS}


def manifests() -> list[tuple[str, dict[str, Any]]]:
    """Every document of every YAML block, with the page that it is on."""
    return [
        (page.relative_to(REPOSITORY).as_posix(), document)
        for page in PAGES
        for _, block in SNIPPET.findall(page.read_text())
        for document in yaml.safe_load_all(textwrap.dedent(block))
        if not document.get("apiVersion", "").startswith(OTHERS)
    ]


def test_the_how_to_pages_show_every_kind_that_users_write() -> None:
    shown = {document["kind"] for page, document in manifests() if page.startswith("docs/how-to/")}
    assert {*BY_KIND, "Secret"} - {"CachedModel"} <= shown


def test_the_tutorial_shows_the_sample_that_it_applies() -> None:
    sample = (REPOSITORY / "manifests/samples/minimal.yaml").read_text()
    shown = [document for page, document in manifests() if page == "docs/tutorial/first-tenant.md"]
    assert shown == list(yaml.safe_load_all(sample))


@pytest.mark.parametrize(("page", "document"), manifests())
def test_a_manifest_in_a_page_is_valid(page: str, document: dict[str, Any]) -> None:
    if document["kind"] == "Secret":
        ring = KeyRing.decode(document["stringData"][KEYS_DATA_KEY].encode())
        assert len(ring) == len(json.loads(document["stringData"][KEYS_DATA_KEY])["keys"])
        return
    kind = BY_KIND[document["kind"]]
    metadata = {"uid": "0", "resourceVersion": "1", "name": "generated", **document["metadata"]}
    kind.parse({**document, "metadata": metadata})
