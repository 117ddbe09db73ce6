from __future__ import annotations

from kvstrata.objects import names

LONGEST = "n" * 40


def test_every_name_of_the_longest_object_fits_a_dns_label() -> None:
    derived = (
        names.model_child(LONGEST),
        names.bundle_root(LONGEST),
        names.bundle_shard(LONGEST, 4095, "b"),
        names.gate_tls(LONGEST),
        names.redis(LONGEST),
        names.redis_auth(LONGEST),
        names.redis_tls(LONGEST),
        names.redis_shard(LONGEST, 9),
    )
    assert max(map(len, derived)) <= 63
    assert len(set(derived)) == len(derived)


def test_a_gates_certificate_names_what_the_operator_checks_and_what_callers_use() -> None:
    found = names.gate_dns_names("tiny", "team", "cluster.local")
    assert found == (
        "gate.tiny.team.kvstrata.internal",
        "kvs-tiny",
        "kvs-tiny.team",
        "kvs-tiny.team.svc",
        "kvs-tiny.team.svc.cluster.local",
    )


def test_a_redis_certificate_names_the_host_that_pods_dial() -> None:
    assert names.redis_host("shared", "team") in names.redis_dns_names("shared", "team", "cluster.local")
