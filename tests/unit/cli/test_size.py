"""`kubectl kvstrata size`: exact for known models, and a sentence for everything that it cannot size."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from e2e.command_blocks import blocks
from kvstrata.api.cachetier import CacheTierSpec
from kvstrata.cli import plugin
from kvstrata.cli.size.architecture import ConfigError, read_config
from kvstrata.cli.size.command import add_to
from kvstrata.cli.size.declared import tier_of
from kvstrata.cli.size.estimate import (
    ELEMENT_BYTES,
    Cache,
    Machine,
    Tier,
    Workload,
    bytes_per_token,
    figures,
    kv_dtype,
    layer_bytes,
    prefill_flop,
)
from kvstrata.contract.store.block_value import value_bytes
from kvstrata.objects.sizing import stored_bytes
from tests.support import fake_kubectl
from tests.support.fake_kubectl import Refused

from .test_receipt import OFFLINE

REPOSITORY = Path(__file__).resolve().parents[3]
CONFIGS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "models.json").read_text())
H100 = 989e12

# Bytes of a token with elements of two bytes and of one; billions of parameters as the models' authors state them.
KNOWN = {
    "Llama-3.1-8B": (131_072, 65_536, 8.03),
    "Llama-3.3-70B": (327_680, 163_840, 70.6),
    "Llama-3.1-405B": (516_096, 258_048, 405.9),
    "Llama-2-7B": (524_288, 262_144, 6.74),
    "Llama-2-13B": (819_200, 409_600, 13.0),
    "Mistral-7B-v0.1": (131_072, 65_536, 7.24),
    "Mixtral-8x7B": (131_072, 65_536, 46.7),
    "Qwen2.5-0.5B": (12_288, 6_144, 0.494),
    "Qwen2.5-7B": (57_344, 28_672, 7.62),
    "Qwen2.5-14B": (196_608, 98_304, 14.8),
    "Qwen2.5-32B": (262_144, 131_072, 32.8),
    "Qwen2.5-72B": (327_680, 163_840, 72.7),
    "Qwen3-0.6B": (114_688, 57_344, 0.596),
    "Qwen3-4B": (147_456, 73_728, 4.02),
    "Qwen3-8B": (147_456, 73_728, 8.19),
    "Qwen3-14B": (163_840, 81_920, 14.8),
    "Qwen3-32B": (262_144, 131_072, 32.8),
    "Qwen3-30B-A3B": (98_304, 49_152, 30.5),
    "Qwen3-235B-A22B": (192_512, 96_256, 235),
    "DeepSeek-V3": (70_272, 35_136, 671),
    "DeepSeek-V2-Lite": (31_104, 15_552, 15.7),
    "gpt-oss-20b": (49_152, 24_576, 20.9),
    "gpt-oss-120b": (73_728, 36_864, 116.8),
    "Gemma-2-9B": (344_064, 172_032, 9.24),
    "Gemma-2-27B": (376_832, 188_416, 27.2),
    "Gemma-3-12B": (393_216, 196_608, 11.8),
    "Gemma-3-27B": (507_904, 253_952, 27.0),
}


def cache_of(name: str, **changed: Any) -> Cache:
    architecture = read_config(CONFIGS[name])
    return Cache(architecture, kv_dtype(architecture), **changed)


def size(*arguments: str) -> int:
    return plugin.main(["size", *arguments])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["Llama-3.1-8B"]))
    return path


def test_every_known_model_has_a_configuration() -> None:
    assert CONFIGS.keys() == KNOWN.keys()


@pytest.mark.parametrize("name", KNOWN)
def test_bytes_of_a_token_are_exact(name: str) -> None:
    two, one, billions = KNOWN[name]
    architecture = read_config(CONFIGS[name])
    assert bytes_per_token(architecture, ELEMENT_BYTES[kv_dtype(architecture)]) == two
    assert bytes_per_token(architecture, ELEMENT_BYTES[kv_dtype(architecture, kv_cache_dtype="fp8")]) == one
    assert architecture.parameters / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Mixtral-8x7B", 12.9), ("Qwen3-30B-A3B", 3.3), ("Qwen3-235B-A22B", 22.2), ("DeepSeek-V3", 37.5)],
)
def test_a_token_uses_its_experts_only(name: str, billions: float) -> None:
    assert read_config(CONFIGS[name]).active_parameters / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("name", "bytes_past_window"),
    # 18 of 36 layers, 10 of 62, 21 of 42, and no layer keep a token that left the window.
    [("gpt-oss-120b", 36_864), ("Gemma-3-27B", 81_920), ("Gemma-2-9B", 172_032), ("Mistral-7B-v0.1", 0)],
)
def test_past_the_window_the_engine_keeps_a_token_in_the_other_layers(name: str, bytes_past_window: int) -> None:
    cache = Cache(read_config(CONFIGS[name]), "bfloat16")
    found = {one.key: one.value for one in figures(cache, Workload(), Machine())}
    assert found["engineBytesPastWindow"] == bytes_past_window


def test_layers_without_attention_keep_no_tokens() -> None:
    hybrid = {**CONFIGS["Qwen3-4B"], "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 9}
    assert bytes_per_token(read_config(hybrid), 2) == 147_456 // 4
    by_interval = {**CONFIGS["Qwen3-4B"], "full_attention_interval": 4}
    assert bytes_per_token(read_config(by_interval), 2) == 147_456 // 4


def test_ranks_share_heads_or_copy_them_and_store_mla_once() -> None:
    llama, deepseek = read_config(CONFIGS["Llama-3.1-8B"]), read_config(CONFIGS["DeepSeek-V3"])
    assert [32 * layer_bytes(llama, 2, ranks) for ranks in (1, 2, 8, 16)] == [131_072, 65_536, 16_384, 16_384]
    assert [bytes_per_token(llama, 2, ranks) for ranks in (1, 8, 16)] == [131_072, 131_072, 262_144]
    assert {bytes_per_token(deepseek, 2, ranks) for ranks in (1, 8)} == {70_272}
    with pytest.raises(ConfigError, match="3 ranks cannot share 8 KV heads evenly"):
        bytes_per_token(llama, 2, 3)


def test_the_type_of_the_cache_follows_the_engines_flags() -> None:
    weights_32 = read_config({**CONFIGS["Llama-3.1-8B"], "torch_dtype": "float32"})
    assert (kv_dtype(weights_32), kv_dtype(weights_32, "float32")) == ("bfloat16", "float32")
    assert kv_dtype(weights_32, "float32", "fp8_e5m2") == "fp8_e5m2"
    quantised = {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}
    with pytest.raises(ConfigError, match="--kv-cache-dtype"):
        kv_dtype(read_config({**CONFIGS["Llama-3.1-8B"], **quantised}))


@pytest.mark.parametrize(
    ("name", "ranks", "gb_per_s"), [("Llama-3.1-8B", 1, 3.2), ("Llama-3.3-70B", 4, 3.7), ("Llama-3.3-70B", 8, 7.3)]
)
def test_break_even_bandwidth_is_the_published_one(name: str, ranks: int, gb_per_s: float) -> None:
    machine = Machine(flop_per_s=ranks * H100, utilisation=0.4)
    cache = cache_of(name, ranks=ranks)
    assert round(machine.break_even_bandwidth(cache, 0) / 1e9, 1) == gb_per_s
    assert machine.break_even_bandwidth(cache, 1) == pytest.approx(machine.break_even_bandwidth(cache, 0), rel=0.001)


def test_long_prompts_are_dearer_than_their_tokens() -> None:
    """The published share of the linear figure at 32,000 tokens of an 8B model is 0.66."""
    machine, cache = Machine(flop_per_s=H100, utilisation=0.4), cache_of("Llama-3.1-8B")
    shares = machine.break_even_bandwidth(cache, 32_000) / machine.break_even_bandwidth(cache, 0)
    assert shares == pytest.approx(0.66, abs=0.005)


def test_work_of_a_window_grows_linearly_past_it() -> None:
    architecture = read_config(CONFIGS["Mistral-7B-v0.1"])
    work = [prefill_flop(architecture, tokens) for tokens in (10_000, 20_000, 30_000)]
    assert work[2] - work[1] == work[1] - work[0]
    assert prefill_flop(architecture, 4096) == prefill_flop(
        read_config({**CONFIGS["Mistral-7B-v0.1"], "sliding_window": None}), 4096
    )


@pytest.mark.parametrize("latency_s", [0, 0.01, 1])
@pytest.mark.parametrize("gb_per_s", [0.5, 1, 3, 10])
def test_the_break_even_prompt_is_the_shortest_that_is_restored_faster(latency_s: float, gb_per_s: float) -> None:
    cache = cache_of("Llama-3.1-8B")
    machine = Machine(H100, 0.4, gb_per_s * 1e9, latency_s)
    least = machine.break_even_tokens(cache)
    assert least % cache.chunk_tokens == 0
    assert machine.restore_s(cache, least) <= machine.compute_s(cache, least)
    shorter = least - cache.chunk_tokens
    assert not shorter or machine.restore_s(cache, shorter) > machine.compute_s(cache, shorter)


def test_no_prompt_pays_on_a_tier_that_is_too_slow() -> None:
    assert Machine(H100, 0.4, 1e3).break_even_tokens(cache_of("Mistral-7B-v0.1")) == 0


@pytest.mark.parametrize(
    "spec",
    [
        {"medium": "CPU", "capacityPerPod": "10Gi"},
        {"medium": "CPU", "capacityPerPod": "1.5Gi", "eviction": {"highWatermarkPercent": 75}},
        {"medium": "NVMe", "capacityPerPod": "100G", "nvme": {"emptyDir": {}}},
        {"medium": "Redis", "capacity": "20Gi", "redis": {"managed": {}}},
        {"medium": "Redis", "capacity": "20Gi", "redis": {"managed": {"shards": 3}}},
        {
            "medium": "Redis",
            "capacity": "20Gi",
            "encryption": "Disabled",
            "redis": {"external": {"endpoints": ["a:1"]}},
        },
        {"medium": "Redis", "capacity": "20Gi", "redis": {"external": {"endpoints": ["a:1"], "cluster": True}}},
    ],
)
def test_a_tier_has_the_bytes_that_the_operator_gives_it(spec: dict[str, Any]) -> None:
    declared = CacheTierSpec.model_validate(spec)
    tier = tier_of({"metadata": {"name": "t"}, "spec": spec}, replicas=3)
    assert tier.block_bytes == stored_bytes(declared)
    assert tier.pods == (0 if spec["medium"] == "Redis" else 3)


def test_a_tier_holds_whole_chunks_with_their_headers() -> None:
    cache = cache_of("Llama-3.1-8B", ranks=2)
    stored = 2 * value_bytes(16 * 1024 * 1024)
    held = Tier("t", "Redis", 10 * stored)
    assert held.tokens(cache) == 10 * 256
    assert Tier("t", "Redis", 10 * stored - 1).tokens(cache) == 9 * 256
    assert Tier("t", "CPU", 10 * 32 * 1024 * 1024).tokens(cache) == 10 * 256
    assert Tier("t", "NVMe", 10 * 32 * 1024 * 1024).tokens(cache) == 9 * 256


def test_every_figure_states_its_source(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = ["--tenants", "64", "--conversations", "10", "--prompt-tokens", "1000", "--tier", "ssd=100Gi"]
    machine = ["--tflops", "989", "--mfu", "0.4", "--bandwidth", "2", "--latency", "10"]
    prices = ["--price-per-gib-month", "2.5", "--price-per-hour", "3"]
    assert size(str(config), "-o", "json", *workload, *machine, *prices) == 0
    reported = json.loads(capsys.readouterr().out)
    figures = reported["figures"]
    assert figures["bytesPerToken"] == {"value": 131_072, "unit": "bytes", "source": "computed"}
    assert figures["kvDtype"]["source"] == "configuration"
    assert {key for key, figure in figures.items() if figure["source"] == "given"} == {
        "tenants", "conversations", "promptTokens", "tflops", "mfu", "bandwidth", "latency", "priceGibMonth",
        "priceHour",
    }  # fmt: skip
    # Three whole chunks of each prompt: the other 232 tokens are not stored.
    assert figures["workingSetTokens"]["value"] == 64 * 10 * 768
    assert figures["keepingPrice"]["value"] == pytest.approx(64 * 10 * 768 * 131_072 / 2**30 * 2.5)
    assert figures["computeSeconds"]["value"] == pytest.approx(1000 * 2 * 8.03e9 / (989e12 * 0.4), rel=0.02)
    assert figures["keepingPaysFrom"]["value"] == pytest.approx(
        1000 * 131_072 / 2**30 * 2.5 / (figures["computeSeconds"]["value"] / 3600 * 3)
    )
    assert reported["tiers"] == [
        {
            "name": "ssd", "medium": "", "bytes": 100 * 2**30, "perPod": False, "pods": 0, "tokens": 819_200,
            "source": "given", "workingSetShare": 819_200 / 491_520,
        }
    ]  # fmt: skip
    assert size(str(config), *workload, *machine, *prices) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "KV of a token in tiers        131,072 (128.0 KiB)    computed" in lines
    assert "ssd   -       100.0 GiB   819,200  100%         given" in lines


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert size(*arguments) == 1
    reported = capsys.readouterr()
    assert reported.out == ""
    assert reported.err.count("\n") == 1
    return reported.err


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"num_hidden_layers": None}, "config.json lacks num_hidden_layers"),
        ({"num_key_value_heads": None, "model_type": "qwen9"}, "config.json lacks num_key_value_heads"),
        ({"torch_dtype": None}, "config.json lacks torch_dtype: state the type of the weights by --dtype"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers in config.json"),
        ({"num_attention_heads": 0}, "num_attention_heads in config.json"),
        ({"layer_types": ["full_attention"]}, "layer_types in config.json has not one entry for each of the 32 layers"),
        ({"layer_types": ["spiral"] * 32}, "'spiral', a kind of layer that is not known here"),
        ({"index_head_dim": 128}, "config.json has index_head_dim"),
        ({"kv_lora_rank": 512}, "config.json lacks qk_rope_head_dim"),
    ],
)
def test_a_configuration_that_cannot_be_sized_is_refused_by_its_field(
    changed: dict[str, Any], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIGS["Llama-3.1-8B"], **changed}))
    assert sentence in refused(capsys, str(path))


def test_files_that_are_no_configuration_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be read, give the path of a config.json" in refused(capsys, str(tmp_path / "none.json"))
    (tmp_path / "config.json").write_text("weights")
    assert "is no JSON" in refused(capsys, str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    assert "is no JSON object" in refused(capsys, str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tenants", "3"], "add --prompt-tokens"),
        (["--tokens", "3", "--tenants", "3"], "leave out --tenants"),
        (["--tflops", "3"], "give both"),
        (["--bandwidth", "3"], "add --tflops and --mfu"),
        (["--tensor-parallel", "3"], "3 ranks cannot share 8 KV heads"),
    ],
)
def test_options_that_lack_others_are_refused(
    arguments: list[str], sentence: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refused(capsys, str(config), *arguments)


POD = {"metadata": {"name": "chat-0", "namespace": "team"}, "status": {"phase": "Running"}}
MODEL: dict[str, Any] = {
    "metadata": {"name": "chat", "namespace": "team"},
    "spec": {
        "model": {"name": "chat", "source": {"hub": {"repository": "meta/llama"}}},
        "engine": {"replicas": 2, "kvCacheDtype": "fp8", "tensorParallelSize": 2},
        "cacheServer": {"chunkSize": 512},
        "tiers": [{"name": "dram"}],
    },
}
TIERS: dict[str, Any] = {
    "items": [
        {"metadata": {"name": "dram"}, "spec": {"medium": "CPU", "capacityPerPod": "1Gi"}},
        {"metadata": {"name": "other"}, "spec": {"medium": "CPU", "capacityPerPod": "9Gi"}},
    ]
}
PAGE = """# HELP kvstrata_cache_blocks_total blocks
kvstrata_cache_blocks_total{tier="dram",scope="a",operation="stored"} 10
kvstrata_cache_blocks_total{tier="dram",scope="a",operation="loaded"} 7
kvstrata_cache_bytes_total{tier="dram",scope="a",operation="stored"} 167772160
"""
ANSWERS: dict[str, Any] = {
    "get cachedmodel.kvstrata.io chat": MODEL,
    "get cachetiers.kvstrata.io": TIERS,
    "get pods": {"items": [POD]},
    "exec chat-0 --container=engine -- python3 -S -c": json.dumps(CONFIGS["Llama-3.1-8B"]),
    "get --raw /api/v1/namespaces/team/pods/chat-0:8081/proxy/metrics": PAGE,
}


def test_a_cached_model_is_sized_by_its_pods_configuration_and_by_its_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_kubectl.put(tmp_path, monkeypatch, ANSWERS)
    assert size("chat", "-o", "json") == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["figures"]["bytesPerToken"]["value"] == 65_536
    assert reported["figures"]["kvDtype"] == {"value": "fp8", "unit": "", "source": "declared"}
    assert reported["figures"]["bytesPerChunk"]["value"] == 512 * 65_536
    assert reported["figures"]["measuredBytesPerToken"] == {"value": 65_536, "unit": "bytes", "source": "measured"}
    assert [(tier["name"], tier["tokens"], tier["pods"]) for tier in reported["tiers"]] == [("dram", 28 * 512, 2)]


@pytest.mark.parametrize(
    ("beginning", "answer", "sentence"),
    [
        ("get cachedmodel.kvstrata.io chat", Refused('cachedmodels.kvstrata.io "chat" not found'), '"chat" not found'),
        ("get cachedmodel.kvstrata.io chat", Refused("E1 memcache\nThe connection was refused"), "no cluster answers"),
        ("get pods", {"items": []}, "has no running pod to read config.json from: give it by --config FILE"),
        (
            "exec chat-0 --container=engine -- python3 -S -c",
            Refused("pods is forbidden"),
            "give it by --config FILE: pods is forbidden",
        ),
        ("exec chat-0 --container=engine -- python3 -S -c", "", "pod chat-0 has no config.json beside its weights"),
        ("exec chat-0 --container=engine -- python3 -S -c", "<html>", "the config.json of the pod is no JSON"),
    ],
)
def test_a_cluster_that_lacks_something_is_reported_in_a_sentence(
    beginning: str,
    answer: Any,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_kubectl.put(tmp_path, monkeypatch, ANSWERS | {beginning: answer})
    assert sentence in refused(capsys, "chat")


def test_a_model_without_tiers_has_the_one_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {name: value for name, value in MODEL["spec"].items() if name != "tiers"}
    default = {"metadata": {"name": "chat"}, "spec": {"medium": "CPU", "capacityPerPod": "4Gi"}}
    changed = {
        "get cachedmodel.kvstrata.io chat": MODEL | {"spec": spec},
        "get cachetiers.kvstrata.io": {"items": [*TIERS["items"], default]},
    }
    fake_kubectl.put(tmp_path, monkeypatch, ANSWERS | changed)
    assert size("chat", "-o", "json") == 0
    assert [tier["name"] for tier in json.loads(capsys.readouterr().out)["tiers"]] == ["chat"]


def test_pods_that_stored_nothing_have_no_measured_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = "get --raw /api/v1/namespaces/team/pods/chat-0:8081/proxy/metrics"
    fake_kubectl.put(tmp_path, monkeypatch, ANSWERS | {page: ""})
    assert size("chat") == 0
    assert "not available: the pods stored no block yet" in capsys.readouterr().out


def test_sizes_need_the_standard_library_and_no_network(config: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, "size", str(config)],
        env={"PYTHONPATH": str(REPOSITORY / "operator/src"), "PATH": os.environ["PATH"]},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "131,072 (128.0 KiB)" in done.stdout


def test_the_guides_example_prints_what_the_guide_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (REPOSITORY / "docs/how-to/size.md").read_text()
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Llama-3.1-8B"]))
    monkeypatch.chdir(tmp_path)
    command = shlex.split(blocks(REPOSITORY / "docs/how-to/size.md")[0].text.replace("\\\n", ""))
    assert command[:2] == ["kubectl", "kvstrata"]
    assert plugin.main(command[2:]) == 0
    assert f"\n```\n{capsys.readouterr().out}```\n" in page


def test_every_option_is_in_the_reference() -> None:
    parser = argparse.ArgumentParser()
    add_to(parser)
    options = {name for action in parser._actions for name in action.option_strings} - {"-h", "--help"}
    page = (REPOSITORY / "docs/reference/plugin.md").read_text()
    assert {name for name in options if f"`{name}`" not in page} == set()
