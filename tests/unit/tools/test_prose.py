"""`make check`: the words that documents, docstrings, messages and names do not use."""

from __future__ import annotations

import pytest

from tools.prose import REPOSITORY, Rules, in_file

RULES = Rules.read()


def refused(name: str, text: str) -> list[tuple[int, str]]:
    return [(hit.line, hit.text) for hit in in_file(name, text, RULES)]


def words_in(name: str, text: str) -> set[str]:
    return {word for _, word in refused(name, text)}


@pytest.mark.parametrize(
    ("sentence", "words"),
    [
        ("Whoever shares a scope shares blocks, and a block tells nobody whose it is.",
         {"Whoever", "tells", "nobody", "whose it is"}),
        ("Return who has a key.", {"who"}),
        ("What slower tiers said that they have.", {"What", "said"}),
        ("The pod was told of it, and asks anew.", {"told", "anew"}),
        ("Its word is trusted for a while.", {"Its word", "for a while"}),
        ("It is kept as it is, whatever the policy says.", {"kept as it is", "whatever", "says"}),
    ],
)  # fmt: skip
def test_a_sentence_of_our_dialect_is_refused_everywhere(sentence: str, words: set[str]) -> None:
    for name, text in (
        ("guide.md", sentence),
        ("module.py", f'"""{sentence}"""\n'),
        ("module.py", f'raise ValueError(f"{sentence} {{reason}}")\n'),
        ("module.py", f"pass  # {sentence}\n"),
        ("script.lua", f"-- {sentence}\n"),
        ("values.yaml", f"key: 1  # {sentence}\n"),
    ):
        assert words_in(name, text) == words, (name, text)


@pytest.mark.parametrize(
    "sentence",
    [
        "Members of a scope share blocks; a block does not record its owner.",
        "Users who deploy the chart read this page.",
        "The message contains what to do and what happens otherwise.",
        "No field is ignored in silence.",
        "In other words, the last one counts.",
        "The order `whose told` quotes code.",
        "Keys whose writers have timed out are released as soon as it is safe.",
        "Report the age of the policy; somewhat older is stale.",
    ],
)
def test_plain_sentences_pass(sentence: str) -> None:
    for name, text in (
        ("guide.md", sentence),
        ("module.py", f'"""{sentence}"""\n'),
        ("script.lua", f"-- {sentence}\n"),
    ):
        assert not refused(name, text), (name, text)


def test_a_phrase_is_found_across_lines_with_the_line_where_it_begins() -> None:
    assert refused("guide.md", "# Title\n\nIt stays as\nit is.\n") == [(3, "stays as it is")]
    assert refused("module.py", '"""Title.\n\nIt stays as\nit is.\n"""\n') == [(3, "stays as it is")]


def test_markdown_code_links_and_questions_are_skipped() -> None:
    text = (
        "```sh\nwhoever\n```\n\n[the page](what.md), <!-- told --> https://example.com/who\n\n## What can it not do?\n"
    )
    assert not refused("guide.md", text)
    assert refused("guide.md", text + "\nWhat it does. Why?\n") == [(9, "What")]


def test_names_are_split_into_words_and_names_of_tests_are_claims() -> None:
    assert words_in("module.py", "told_s = NOBODY = 1\nclass TellFormer: ...\n") == {"told_s", "NOBODY", "TellFormer"}
    assert not refused("module.py", "retold = whole = 1\ndef test_what_it_told() -> None: ...\n")


def test_code_and_keys_are_no_prose() -> None:
    assert not refused("module.py", 'row["told"] = {"whose": 1}\n')
    assert not refused("values.yaml", "whose: told\n")


def test_every_path_that_is_listed_as_clean_exists() -> None:
    assert RULES.clean
    for path in RULES.clean:
        assert (REPOSITORY / path).exists(), path
