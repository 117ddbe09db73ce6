"""Settings of the gate: flags before variables before defaults, and errors that name the setting."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from kvstrata_sidecar.gate.settings import Settings, SettingsError, load, variable

REQUIRED = {
    "POD_NAME": "pod-1", "POD_UID": "uid-1", "POD_NAMESPACE": "ns", "KVSTRATA_MODEL": "tiny",
    "KVSTRATA_IDENTITY": "identity", "KVSTRATA_BUNDLE_SECRET": "bundle", "KUBERNETES_SERVICE_HOST": "10.0.0.1",
}  # fmt: skip
SHORTEST = Settings("pod-1", "uid-1", "ns", "tiny", "identity", "bundle", served_model="tiny", kube_host="10.0.0.1")


def test_what_the_pod_says_of_itself_is_enough() -> None:
    assert load([], REQUIRED) == SHORTEST


def test_all_addresses_of_both_families_are_the_default() -> None:
    assert SHORTEST.bind == "::"


def test_the_served_model_may_have_another_name() -> None:
    assert load([], {**REQUIRED, "KVSTRATA_SERVED_MODEL": "org/tiny"}) == replace(SHORTEST, served_model="org/tiny")


@pytest.mark.parametrize("name", [field.name for field in fields(Settings)])
def test_each_setting_is_a_variable_and_a_flag_that_goes_before_it(name: str) -> None:
    default = getattr(SHORTEST, name)
    kind: type = Path if isinstance(default, Path) else type(default)
    values = {str: ("x", "y"), int: ("7", "8"), float: ("1.5", "2.5"), bool: ("false", "True"), Path: ("/x", "/y")}
    first, second = values[kind]
    expected = [text == "True" if kind is bool else kind(text) for text in (first, second)]
    environment = {**REQUIRED, variable(name): first, "KVSTRATA_SERVED_MODEL": "tiny"} | {variable(name): first}
    flag = f"--{name.replace('_', '-')}"
    loaded = [load(arguments, environment) for arguments in ([], [flag, second], [f"{flag}={second}"])]
    assert loaded == [replace(SHORTEST, **{name: value}) for value in (expected[0], expected[1], expected[1])]


def test_variables_of_kubernetes_keep_their_names() -> None:
    names = {name: variable(name) for name in ("pod_name", "pod_uid", "pod_namespace", "kube_host", "kube_port")}
    assert names == {
        "pod_name": "POD_NAME", "pod_uid": "POD_UID", "pod_namespace": "POD_NAMESPACE",
        "kube_host": "KUBERNETES_SERVICE_HOST", "kube_port": "KUBERNETES_SERVICE_PORT",
    }  # fmt: skip
    assert variable("max_in_flight") == "KVSTRATA_MAX_IN_FLIGHT"


@pytest.mark.parametrize("name", sorted(REQUIRED))
@pytest.mark.parametrize("missing", [None, ""], ids=["absent", "empty"])
def test_a_setting_that_must_be_there_is_named(name: str, missing: str | None) -> None:
    environment = {key: value for key, value in REQUIRED.items() if key != name} | ({name: ""} if missing == "" else {})
    with pytest.raises(SettingsError) as error:
        load([], environment)
    assert str(error.value) == f"not set: {name}"


def test_all_that_is_missing_is_named_at_once() -> None:
    with pytest.raises(SettingsError) as error:
        load([], {"POD_NAME": "pod-1"})
    assert str(error.value) == f"not set: {', '.join(name for name in REQUIRED if name != 'POD_NAME')}"


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("KVSTRATA_HTTP_PORT", "many", "int"),
        ("KVSTRATA_SHUTDOWN_S", "soon", "float"),
        ("KVSTRATA_KUBE_TLS", "1", "bool"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_the_name_of_its_setting(name: str, text: str, kind: str) -> None:
    with pytest.raises(SettingsError) as error:
        load([], {**REQUIRED, name: text})
    assert str(error.value) == f"{name} is not a {kind}: {text!r}"


def test_each_flag_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        load(["--help"], REQUIRED)
    assert end.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    assert told.startswith("usage: kvstrata-gate ")
    for field in fields(Settings):
        assert f"--{field.name.replace('_', '-')} " in told
        assert f"or {variable(field.name)}" in told
