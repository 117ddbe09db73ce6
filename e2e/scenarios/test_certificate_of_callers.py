"""A certificate with another key in the Secret that callers' TLS is from: handshakes continue, and status names it."""

from __future__ import annotations

import copy
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e.product.calls import HTTPS_PORT, Replica
from e2e.product.chapters import ACME_KEY, MODEL, _object
from e2e.product.install import DEMO_NAMESPACE, READY_TIMEOUT_S
from e2e.product.kubectl import Kubectl, pod_names, wait_until
from e2e.product.traffic import Caller, traffic

pytestmark = pytest.mark.cluster

NAME, SECRET = "certified", "certified-tls"
HOST = f"kvs-{NAME}.{DEMO_NAMESPACE}.svc"
AFTERWARDS = 6
"""Answers after the refusal. A context of which only the certificate was replaced would refuse the first."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, in PEM."""

    certificate: str
    key: str


class Authority:
    """An authority of the callers, made in a folder, that signs certificates for the model's Service."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        usage = ("-addext", "keyUsage=critical,keyCertSign")
        about = ("-days", "30", "-subj", "/CN=callers", *usage, "-out", "ca.crt")
        self._openssl("req", "-x509", *self._new_key("ca"), *about)
        # Clients that check strictly want to see the authority's key named.
        extensions = (f"subjectAltName=DNS:{HOST}", "extendedKeyUsage=serverAuth", "authorityKeyIdentifier=keyid")
        (folder / "ext").write_text("\n".join(extensions))

    @property
    def certificate(self) -> str:
        """Its own certificate, in PEM."""
        return (self._folder / "ca.crt").read_text()

    def pair(self, name: str) -> Pair:
        """Return a new pair."""
        self._openssl("req", *self._new_key(name), "-subj", f"/CN={name}", "-out", f"{name}.csr")
        signer = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "10", "-extfile", "ext")
        self._openssl("x509", "-req", "-in", f"{name}.csr", *signer, "-out", f"{name}.crt")
        return Pair((self._folder / f"{name}.crt").read_text(), (self._folder / f"{name}.key").read_text())

    def _new_key(self, name: str) -> tuple[str, ...]:
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        return (*curve, "-keyout", f"{name}.key")

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(("openssl", *arguments), cwd=self._folder, check=True, capture_output=True)


@dataclass(frozen=True, slots=True)
class Certified:
    """The model with a certificate of its callers' authority, and a way to its pod."""

    kubectl: Kubectl
    authority: Authority
    first: Pair
    where: Replica

    def store(self, certificate: str, key: str) -> None:
        """Replace the Secret."""
        self.kubectl.apply(_secret(certificate, key, self.authority))

    def condition(self, kind: str) -> tuple[str, str, str]:
        """Return status, reason and message of a condition of the model."""
        found = self.kubectl.condition("cachedmodel", NAME, DEMO_NAMESPACE, kind)
        return found.get("status", ""), found.get("reason", ""), found.get("message", "")

    def shown(self) -> str:
        """Return the certificate that a caller gets in a new handshake, in PEM. Raises OSError without one."""
        connection = self.where._connect()
        try:
            connection.connect()
            found = connection.sock.getpeercert(binary_form=True)
        finally:
            connection.close()
        assert found is not None
        return ssl.DER_cert_to_PEM_cert(found)


@pytest.fixture
def certified(kubectl: Kubectl, tmp_path: Path) -> Iterator[Certified]:
    """A small model whose gate has its certificate from a Secret of the user's; removed afterwards."""
    authority = Authority(tmp_path)
    first = authority.pair("first")
    try:
        kubectl.apply(_secret(first.certificate, first.key, authority), _object("CachedModel", NAME, _spec(kubectl)))
        wait_until("the model is ready", lambda: _ready(kubectl), READY_TIMEOUT_S, every_s=1)
        (pod,) = pod_names(kubectl.list("pod", DEMO_NAMESPACE, f"kvstrata.io/model={NAME}"))
        tls = ssl.create_default_context(cadata=authority.certificate)
        with kubectl.forward(DEMO_NAMESPACE, f"pod/{pod}", HTTPS_PORT) as port:
            where = Replica(kubectl, DEMO_NAMESPACE, NAME, pod, port, tls)
            yield Certified(kubectl, authority, first, where)
    finally:
        kubectl.run("-n", DEMO_NAMESPACE, "delete", "cachedmodel", NAME, "--ignore-not-found")
        kubectl.run("-n", DEMO_NAMESPACE, "delete", "secret", SECRET, "--ignore-not-found")


def test_a_certificate_with_another_key_changes_no_handshake_and_its_secret_is_named(certified: Certified) -> None:
    kubectl, where = certified.kubectl, certified.where
    status, reason, message = certified.condition("CertificateCurrent")
    assert (status, reason) == ("True", "CertificateShown")
    assert SECRET in message
    assert _same(certified.shown(), certified.first.certificate)

    second = certified.authority.pair("second")
    # Every request has a connection of its own, and so a handshake.
    with traffic(Caller(where, "acme", ACME_KEY, lambda: "hello"), pause_s=0.5) as running:
        running.wait_for(2)
        certified.store(second.certificate, certified.first.key)
        wait_until("status names the Secret", lambda: certified.condition("CertificateCurrent")[0] == "False")
        status, reason, message = certified.condition("CertificateCurrent")
        assert reason == "CertificateUnusable"
        assert message.startswith(f"Secret {SECRET}, pod {where.pod}: ")
        assert "the former one is" in message
        assert "store a valid certificate and its own key" in message
        wait_until("Ready names it, too", lambda: certified.condition("Ready")[:2] == ("False", reason))
        assert SECRET in certified.condition("Ready")[2]

        running.wait_for(AFTERWARDS)
        assert _same(certified.shown(), certified.first.certificate), "callers got another certificate"
        assert _pod_is_ready(kubectl, where.pod), "callers are sent to no pod"

        certified.store(second.certificate, second.key)
        wait_until("the second pair is shown", lambda: certified.condition("CertificateCurrent")[0] == "True")
        wait_until("the model is ready", lambda: _ready(kubectl))
        running.wait_for(2)
        assert _same(certified.shown(), second.certificate)
        account = running.account
    print(f"{message}; meanwhile {account}")
    assert not account.failed, str(account)
    assert _pod_is_ready(kubectl, where.pod)


def _secret(certificate: str, key: str, authority: Authority) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": SECRET, "namespace": DEMO_NAMESPACE},
        "type": "kubernetes.io/tls",
        "stringData": {"tls.crt": certificate, "tls.key": key, "ca.crt": authority.certificate},
    }


def _spec(kubectl: Kubectl) -> dict[str, Any]:
    """The spec of a model with one small replica without tiers, after the demo's."""
    made: dict[str, Any] = copy.deepcopy(kubectl.get("cachedmodel", MODEL, DEMO_NAMESPACE)["spec"])
    made["model"]["name"] = NAME  # which a replica asks for
    made["engine"]["args"][-1] = "96"
    made["engine"] |= {"replicas": 1, "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}}}
    made["gate"]["tls"] = {"mode": "Secret", "secretRef": {"name": SECRET}}
    return made | {"tiers": [], "probe": {"mode": "Never"}}


def _ready(kubectl: Kubectl) -> bool:
    ready = kubectl.condition("cachedmodel", NAME, DEMO_NAMESPACE, "Ready")
    return ready.get("status") == "True" and ready.get("reason") != "NoLivePods"


def _pod_is_ready(kubectl: Kubectl, pod: str) -> bool:
    conditions = kubectl.get("pod", pod, DEMO_NAMESPACE)["status"].get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _same(shown: str, stored: str) -> bool:
    return ssl.PEM_cert_to_DER_cert(shown) == ssl.PEM_cert_to_DER_cert(stored)
