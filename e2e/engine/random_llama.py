"""Make a small Llama with random weights, a byte-level tokenizer and a chat template in a local folder.

For tests of the guard and benchmarks that need an engine's real code and none of its answers: two layers take a small
part of the time of SmolLM2's thirty (`smollm2.py`). Every byte of a prompt is one token, so that tests count tokens
without a tokenizer, and one token's KV takes 2 * layers * kv_heads * head_dim * 2 bytes = 2,048 bytes in
bfloat16. The seed is fixed: two builds give the same weights, and two replicas the same blocks.

With `--merges` the tokenizer merges bytes as those of real models do, so that the end of a text may have other tokens
when something follows, and the chat template renders tools and, unless it is given one, today's date: SmolLM2's does
neither. With `--windows` it is a Gemma 3, in which a layer with a sliding window stands beside one with full attention.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
MAX_CONTEXT_TOKENS = 4096
WINDOW_TOKENS = 128
SEED = 0

# One line for each message: short, so that a chat prompt's token count stays close to its text's byte count, and
# free of dates and random ids, so that the same messages always give the same tokens.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


MERGED_WORDS = " the of and to that you answer is are cache tier block tenant policy prefix engine ---- \n\n ing tion"

MERGES_TEMPLATE = (
    "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "Today: {{ date_string }}\n"
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
) + CHAT_TEMPLATE


def make_merges() -> list[tuple[str, str]]:
    """Return merges that make one token of each of a few words, from left to right."""
    merges: dict[tuple[str, str], None] = {}
    for word in MERGED_WORDS.replace("\n", "\u010a").split(" "):
        for text in (word, "\u0120" + word):
            for end in range(2, len(text) + 1):
                merges[text[: end - 1], text[end - 1]] = None
    return list(merges)


def make_tokenizer(*, merges: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer of 256 byte symbols and three special tokens: one token for each byte unless it merges."""
    vocabulary = {UNKNOWN: 0, BEGIN: 1, END: 2}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[symbol] = len(vocabulary)
    table = make_merges() if merges else []
    for left, right in table:
        vocabulary.setdefault(left + right, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=table, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=END,
        model_max_length=MAX_CONTEXT_TOKENS,
    )
    fast.chat_template = MERGES_TEMPLATE if merges else CHAT_TEMPLATE
    return fast


def make_model(vocabulary_size: int, *, windows: bool = False) -> PreTrainedModel:
    """Return a two-layer Llama, or Gemma 3, of about 1.6 million random bfloat16 weights."""
    torch.manual_seed(SEED)
    sizes = {
        "vocab_size": vocabulary_size,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        # vLLM's CPU attention wants a head dimension that it has a kernel for; 64 is the smallest.
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": MAX_CONTEXT_TOKENS,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        # Wider than usual: with the default of 0.02 all logits are nearly equal, and a wrong block would hardly show.
        "initializer_range": 0.15,
    }
    if windows:
        layers = ["sliding_attention", "full_attention"]
        config = Gemma3TextConfig(**sizes, head_dim=64, layer_types=layers, sliding_window=WINDOW_TOKENS)
        return Gemma3ForCausalLM(config).to(torch.bfloat16)
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).to(torch.bfloat16)


def main() -> None:
    """Write the model and its tokenizer into the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write; made when missing")
    parser.add_argument("--merges", action="store_true", help="a tokenizer that merges, a template with tools and date")
    parser.add_argument("--windows", action="store_true", help="one of two layers has a sliding window")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    tokenizer = make_tokenizer(merges=arguments.merges)
    tokenizer.save_pretrained(folder)
    model = make_model(len(tokenizer), windows=arguments.windows)
    model.save_pretrained(folder)
    print(f"{folder}: {sum(weights.numel() for weights in model.parameters()):,} weights, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
