"""The samples are what people copy first: every one is accepted as it stands, and means what it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.images.catalogue import IMAGES, version
from kvstrata.api import KINDS
from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachedmodel_status import ProbeMode
from kvstrata.api.cachetier import CacheTier
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.plan.rules.model import tiers_ordered
from tests.api.apiserver import ApiServer

SAMPLES = Path(__file__).resolve().parents[2] / "manifests" / "samples"
BY_KIND = {kind.INFO.kind: kind for kind in KINDS}


def documents(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(folder.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            yield path.name, document


MINIMAL = list(yaml.safe_load_all((SAMPLES / "minimal.yaml").read_text()))
DEMO = [(name, document) for name, document in documents(SAMPLES) if name != "minimal.yaml"]
EXTRA = list(documents(SAMPLES / "extra"))
GPU = list(documents(SAMPLES / "gpu"))
LOCAL_IMAGES = {f"localhost/kvstrata-{image.name}:{tag}" for image in IMAGES for tag in ("local", version())}


def label(pair: tuple[str, dict[str, Any]]) -> str:
    metadata = pair[1]["metadata"]
    return f"{pair[0]}:{pair[1]['kind']}/{metadata.get('name') or metadata.get('generateName')}"


@pytest.fixture(scope="module")
def demo_namespace(api: ApiServer) -> None:
    for _, document in DEMO:
        if document["kind"] == "Namespace":
            api.create(document)


@pytest.mark.usefixtures("demo_namespace")
@pytest.mark.parametrize("sample", [*DEMO, *EXTRA, *GPU, *(("minimal.yaml", one) for one in MINIMAL)], ids=label)
def test_the_sample_is_accepted_and_read_as_it_stands(api: ApiServer, sample: tuple[str, dict[str, Any]]) -> None:
    document = sample[1]
    if document["kind"] == "Namespace":
        return
    stored = api.create(document, dry_run=True)
    if document["kind"] not in BY_KIND:
        return
    read = BY_KIND[document["kind"]].parse(stored)
    assert read.spec.to_kubernetes() == document["spec"]  # type: ignore[attr-defined]


def test_every_kind_has_a_sample() -> None:
    assert {document["kind"] for _, document in [*DEMO, *EXTRA]} >= BY_KIND.keys()


def test_files_are_numbered_and_listed_in_the_order_of_reading() -> None:
    paths = [*SAMPLES.glob("[0-9]*.yaml"), *SAMPLES.glob("*/*.yaml")]
    names = [str(path.relative_to(SAMPLES)) for path in sorted(paths, key=lambda path: path.name)]
    numbers = [Path(name).name[:2] for name in names]
    assert len(set(numbers)) == len(names)
    assert all(number.isdigit() for number in numbers)
    listed = [line.split("`")[1] for line in (SAMPLES / "README.md").read_text().splitlines() if line.startswith("| `")]
    assert listed == ["minimal.yaml", *names]


def test_a_model_and_a_tenant_take_two_objects_and_25_lines() -> None:
    assert [document["kind"] for document in MINIMAL] == ["CachedModel", "TenantCachePolicy"]
    assert len((SAMPLES / "minimal.yaml").read_text().splitlines()) <= 25


def test_samples_need_nothing_that_the_local_cluster_lacks() -> None:
    services = {f"{d['metadata']['name']}.{d['metadata']['namespace']}.svc" for _, d in EXTRA if d["kind"] == "Service"}
    assert services
    for name, document in [*DEMO, *EXTRA, *(("minimal.yaml", one) for one in MINIMAL)]:
        for key, value in leaves(document):
            if key == "image":
                assert value in LOCAL_IMAGES, name
            if key == "endpoints":
                assert value.rpartition(":")[0] in services, name
            assert "gpu" not in key, name
            assert key != "storageClassName", name


def leaves(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every scalar below `node`, with the nearest key above it."""
    if isinstance(node, dict):
        for name, child in node.items():
            yield from leaves(child, name)
    elif isinstance(node, list):
        for child in node:
            yield from leaves(child, key)
    else:
        yield key, str(node)


@pytest.mark.parametrize("folder", [DEMO, GPU], ids=["demo", "gpu"])
def test_samples_follow_the_advice_of_conditions(folder: list[tuple[str, dict[str, Any]]]) -> None:
    tiers = {d["metadata"]["name"]: CacheTier.parse(d) for _, d in folder if d["kind"] == "CacheTier"}
    models = [CachedModel.parse(d) for _, d in folder if d["kind"] == "CachedModel"]
    assert models
    for model in models:
        ordered = tiers_ordered([tiers[name] for name in model.tier_names])
        assert ordered.status == "True", ordered.message
        assert model.spec.probe.mode is not ProbeMode.NEVER


def test_all_references_within_the_demo_resolve() -> None:
    objects = {(document["kind"], document["metadata"]["name"]): document for _, document in DEMO}
    tiers = {name for kind, name in objects if kind == "CacheTier"}
    models = [CachedModel.parse(o) for (kind, _), o in objects.items() if kind == "CachedModel"]
    policies = [TenantCachePolicy.parse(o) for (kind, _), o in objects.items() if kind == "TenantCachePolicy"]
    assert models
    assert policies
    for model in models:
        assert set(model.tier_names) <= tiers
        assert ("Secret", model.api_keys_secret) in objects
    for policy in policies:
        assert {budget.tier for budget in policy.spec.budgets} <= tiers
        group = policy.spec.group_name
        if group is not None:
            assert policy.spec.tenant in objects[("TenantGroup", group)]["spec"]["members"]


def test_every_tenant_of_the_demo_has_a_key() -> None:
    secret = next(document for _, document in DEMO if document["kind"] == "Secret")
    tenants = {entry["tenant"] for entry in yaml.safe_load(secret["stringData"]["keys.json"])["keys"]}
    policies = [TenantCachePolicy.parse(d) for _, d in DEMO if d["kind"] == "TenantCachePolicy"]
    assert {policy.spec.tenant for policy in policies} == tenants


def test_the_shared_tiers_of_the_demo_are_encrypted() -> None:
    shared = [tier for _, d in DEMO if d["kind"] == "CacheTier" and (tier := CacheTier.parse(d)).spec.medium == "Redis"]
    assert shared
    assert all(tier.spec.encryption_required for tier in shared)
