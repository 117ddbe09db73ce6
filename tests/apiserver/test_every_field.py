"""The API has what the operator carries out: each field and value of the CRDs is applied and reconciled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.control_plane import ControlPlane
from tests.apiserver.conftest import OPERATOR_NAMESPACE, REPOSITORY, install_crds
from tests.apiserver.operator_process import OperatorProcess, Operators
from tests.apiserver.server import Server
from tests.support.generated.generator import Schema, load_schemas

pytestmark = pytest.mark.claim("every field and every value of the CRDs is reconciled")

OBJECTS = [one for one in yaml.safe_load_all((Path(__file__).parent / "every_field.yaml").read_text()) if one]
OWN = [one for one in OBJECTS if one["apiVersion"].startswith("kvstrata.io/")]
SETTLES_WITHIN_S = 180.0


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("every-field")) as started:
        yield started


@pytest.fixture(scope="module")
def server(plane: ControlPlane) -> Server:
    started = Server(plane.kubectl, plane.kubeconfig)
    install_crds(started)
    started.kubectl("create", "namespace", OPERATOR_NAMESPACE)
    return started


@pytest.fixture(scope="module")
def operator(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    operators = Operators(server.kubeconfig, OPERATOR_NAMESPACE, REPOSITORY, tmp_path_factory.mktemp("operators"))
    running = operators.start("every-field")
    running.wait_until_leading()
    yield running
    running.kill()


def declared(schema: Schema, path: str = "spec") -> Iterator[str]:
    """Return each field of a schema, and each value of its enumerations."""
    yield from (f"{path}={value}" for value in schema.get("enum", ()))
    if "items" in schema:
        yield from declared(schema["items"], path)
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}"
        yield from declared(field, f"{path}.{name}")


def used(value: Any, path: str = "spec") -> Iterator[str]:
    """Return each field that an object sets, with its value."""
    if isinstance(value, dict):
        for name, field in value.items():
            yield f"{path}.{name}"
            yield from used(field, f"{path}.{name}")
    elif isinstance(value, list):
        for item in value:
            yield from used(item, path)
    else:
        yield f"{path}={value}"


@pytest.mark.parametrize("kind", load_schemas(REPOSITORY / "crds"))
def test_the_objects_use_every_field_and_every_value(kind: str) -> None:
    missing = set(declared(load_schemas(REPOSITORY / "crds")[kind]))
    for one in OWN:
        if one["kind"] == kind:
            missing -= set(used(one["spec"]))
    assert missing == set()


def test_every_field_and_every_value_is_reconciled(server: Server, operator: OperatorProcess) -> None:
    for one in OBJECTS:
        server.apply(one)
    left: list[str] = []

    def all_are_reconciled() -> bool:
        left[:] = [problem for namespace in ("fields", "fields-kms") for problem in unreconciled(server, namespace)]
        return not left

    try:
        server.wait("every object to be reconciled", all_are_reconciled, SETTLES_WITHIN_S)
    except AssertionError:
        raise AssertionError("\n".join([*left, operator.log_tail()])) from None


def unreconciled(server: Server, namespace: str) -> list[str]:
    """Return the objects whose generation no status has observed, or that are stalled."""
    found = json.loads(server.kubectl("-n", namespace, "get", "cache-status", "-o", "json"))["items"]
    problems = []
    for one in found:
        name, status = f"{one['kind']} {one['metadata']['name']}", one.get("status") or {}
        if status.get("observedGeneration") != one["metadata"]["generation"]:
            problems.append(f"{name} is not observed")
        problems += [
            f"{name}: {condition['reason']}: {condition['message']}"
            for condition in status.get("conditions", ())
            if condition["type"] == "Stalled" and condition["status"] == "True"
        ]
    return problems
