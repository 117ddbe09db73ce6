from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.objects.pod.identity import KV_NEUTRAL_FLAGS, KV_NEUTRAL_VARIABLES, cache_identity, kv_relevant_arguments
from tests.unit.objects.builders import model


def identity(*args: str, **parts: Any) -> str:
    return cache_identity(model(**parts, engine={"args": list(args), **parts.pop("engine", {})}))


def with_engine(**engine: Any) -> str:
    return cache_identity(model(engine=engine))


def test_an_identity_is_sixteen_hexadecimal_digits() -> None:
    value = identity()
    assert len(value) == 16
    assert int(value, 16) >= 0


def test_the_identity_of_a_known_model_never_changes_by_itself() -> None:
    """A change of this value throws away every cache there is: it must be meant."""
    assert identity("--quantization", "fp8") == "a59d1e6201a7a463"


@pytest.mark.parametrize("flag", sorted(KV_NEUTRAL_FLAGS))
def test_a_neutral_flag_changes_nothing(flag: str) -> None:
    assert identity(flag, "7") == identity(f"{flag}=7") == identity()


@pytest.mark.parametrize("flag", ["--no-async-scheduling", "--max_num_seqs", "--structured-outputs-config.backend"])
def test_a_neutral_flag_is_neutral_in_every_spelling(flag: str) -> None:
    assert identity(flag, "7") == identity()


@pytest.mark.parametrize("name", sorted(KV_NEUTRAL_VARIABLES))
def test_a_neutral_variable_changes_nothing(name: str) -> None:
    assert with_engine(env=[{"name": name, "value": "7"}]) == with_engine()


@pytest.mark.parametrize(
    "args",
    [
        ["--quantization", "fp8"],
        ["--enforce-eager"],
        ["--block-size", "32"],
        ["--rope-scaling", '{"factor":2}'],
        ["--hf-overrides.num_hidden_layers", "2"],
        ["--load-format", "dummy"],
        ["--seed", "-1"],
        ["-pp", "2"],
        ["--a-flag-that-nobody-thought-of"],
        ["word"],
    ],
)
def test_any_other_argument_is_another_identity(args: list[str]) -> None:
    assert identity(*args) != identity()


def test_the_value_of_an_argument_counts() -> None:
    assert identity("--block-size", "16") != identity("--block-size", "32")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["--block-size=32"], ["--block-size", "32"]),
        (["--block_size", "32"], ["--block-size", "32"]),
        (["-q", "fp8"], ["--quantization", "fp8"]),
        (["--block-size", "32", "--enforce-eager"], ["--enforce-eager", "--block-size=32"]),
        (["--rope-scaling", "a=b"], ["--rope-scaling=a=b"]),
        (["--seed", "-1"], ["--seed=-1"]),
    ],
)
def test_spelling_and_order_of_flags_do_not_count(one: list[str], other: list[str]) -> None:
    assert identity(*one) == identity(*other)


def test_the_order_of_a_flags_values_counts() -> None:
    assert kv_relevant_arguments(["--x", "a", "b"]) != kv_relevant_arguments(["--x", "b", "a"])


def test_a_word_behind_a_neutral_flag_is_part_of_that_flag_only() -> None:
    assert kv_relevant_arguments(["--max-num-seqs", "8", "--x", "1"]) == (("--x", ("1",)),)


flags = st.sampled_from(["--block-size=16", "--enforce-eager", "--seed=1", "--max-num-seqs=4", "--x=y"])


@given(st.permutations(["--block-size=16", "--enforce-eager", "--seed=1", "--max-num-seqs=4", "--x=y"]))
def test_flags_mean_the_same_in_any_order(arguments: list[str]) -> None:
    assert kv_relevant_arguments(arguments) == kv_relevant_arguments(sorted(arguments))


@given(st.lists(flags, unique=True), st.lists(flags, unique=True))
def test_two_identities_are_equal_only_if_what_matters_is(one: list[str], other: list[str]) -> None:
    relevant = [{flag for flag in chosen if flag != "--max-num-seqs=4"} for chosen in (one, other)]
    assert (identity(*one) == identity(*other)) == (relevant[0] == relevant[1])


@pytest.mark.parametrize(
    "changed",
    [
        {"source": {"path": "/opt/other"}},
        {"source": {"hub": {"repository": "a/b"}}},
        {"source": {"pvc": {"claimName": "weights"}}},
        {"source": {"pvc": {"claimName": "weights", "path": "/v2"}}},
        {"model": {"revision": "v2"}},
        {"model": {"tokenizer": "/opt/tokenizer"}},
        {"model": {"dtype": "bfloat16"}},
        {"model": {"maxModelLen": 4096}},
        {"engine": {"image": "engine:2"}},
        {"engine": {"tensorParallelSize": 2}},
        {"engine": {"env": [{"name": "VLLM_ATTENTION_BACKEND", "value": "FLASHINFER"}]}},
        {"cacheServer": {"image": "lmcache:2"}},
        {"cacheServer": {"chunkSize": 512}},
        {"cacheGeneration": 1},
    ],
    ids=str,
)
def test_whatever_changes_kv_bytes_is_another_identity(changed: dict[str, Any]) -> None:
    assert cache_identity(model(**changed)) != cache_identity(model())


@pytest.mark.parametrize(
    "changed",
    [
        {"engine": {"replicas": 9}},
        {"engine": {"resources": {"limits": {"memory": "9Gi"}}}},
        {"engine": {"startupTimeout": "5m"}},
        {"engine": {"podTemplate": {"nodeSelector": {"a": "b"}}}},
        {"engine": {"tensorParallelSize": 1}},
        {"model": {"dtype": "auto"}},
        {"cacheServer": {"chunkSize": 256, "image": "engine:1", "resources": {"limits": {"memory": "9Gi"}}}},
        {"gate": {"tls": {"mode": "Disabled"}}},
        {"reuse": {"mode": "Disabled"}},
        {"cacheGeneration": 0},
    ],
    ids=str,
)
def test_what_leaves_kv_bytes_alone_keeps_the_identity(changed: dict[str, Any]) -> None:
    assert cache_identity(model(**changed)) == cache_identity(model())


def test_the_name_that_callers_use_does_not_count() -> None:
    assert cache_identity(model(model={"name": "other"})) == cache_identity(model())


def test_the_type_of_cached_values_counts_and_the_share_of_memory_does_not() -> None:
    plain = with_engine()
    assert with_engine(gpuMemoryUtilizationPercent=50) == plain
    assert with_engine(kvCacheDtype="auto") == plain
    assert with_engine(kvCacheDtype="fp8") != plain
