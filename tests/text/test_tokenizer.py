"""The tokenizer of prompts, completions, the engine and the exported model."""

from __future__ import annotations

import filecmp
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from llama_checkpoint import BOS, EOS, arithmetic_lines, claim_llama_class
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from asyncrl.text.round_trip import TRIPS, Coverage, refuse_another_decoder, refuse_lossy
from asyncrl.text.tokenizer import (
    ROUND_TRIP_TEXTS,
    TokenizerError,
    decode,
    encode_prompts,
    load_tokenizer,
    refuse_another_tokenizer,
    save_tokenizer,
    tokenizer_hash,
)


@pytest.fixture
def misnamed(llama_model: Path, tmp_path: Path) -> Path:
    """A checkpoint with a byte-level BPE whose config names LlamaTokenizerFast."""
    return claim_llama_class(shutil.copytree(llama_model, tmp_path / "misnamed"))


def changed(model: Path, target: Path, **changes: Any) -> Path:
    """A copy of the checkpoint with changes to its tokenizer.json."""
    shutil.copytree(model, target)
    tree = json.loads((target / "tokenizer.json").read_text())
    (target / "tokenizer.json").write_text(json.dumps(tree | changes))
    return target


def test_round_trips_do_not_depend_on_the_class_that_the_checkpoint_names(
    misnamed: Path, llama_model: Path
) -> None:
    ours, theirs = load_tokenizer(str(misnamed)), AutoTokenizer.from_pretrained(misnamed)
    for text in ROUND_TRIP_TEXTS:
        assert decode(ours, ours.encode(text, add_special_tokens=False)) == text
    assert theirs.decode(ours.encode("What is 2", add_special_tokens=False)) == "WhatĠisĠ2", (
        "transformers' own class still decodes this wrongly"
    )
    assert (
        tokenizer_hash(ours)
        == tokenizer_hash(load_tokenizer(str(llama_model)))
        != tokenizer_hash(theirs)
    )


def test_two_different_tokenizers_are_refused(misnamed: Path) -> None:
    ours, theirs = load_tokenizer(str(misnamed)), AutoTokenizer.from_pretrained(misnamed)
    refuse_another_decoder(ours, str(misnamed), ours)
    with pytest.raises(
        TokenizerError,
        match=(
            r"model.path = '.*misnamed': the engine's tokenizer does not decode what the prompts'"
            r" tokenizer encodes: '3 \+ 40 =' comes"
        ),
    ) as error:
        refuse_another_decoder(ours, str(misnamed), theirs)
    assert "\n" not in str(error.value)


def test_generators_with_another_tokenizer_are_refused(misnamed: Path) -> None:
    refuse_another_tokenizer(str(misnamed), tokenizer_hash(load_tokenizer(str(misnamed))))
    with pytest.raises(
        TokenizerError,
        match=(
            r"model.path = '.*misnamed': the generators' tokenizer differs from that of the prompts"
        ),
    ):
        refuse_another_tokenizer(
            str(misnamed), tokenizer_hash(AutoTokenizer.from_pretrained(misnamed))
        )


def test_a_tokenizer_without_its_decoder_is_refused(
    llama_model: Path, tiny_model: Path, tmp_path: Path
) -> None:
    for model in (llama_model, tiny_model):
        refuse_lossy(load_tokenizer(str(model)), "whole")
        broken = changed(model, tmp_path / model.name, decoder=None)
        with pytest.raises(
            TokenizerError, match=r"its tokenizer does not decode what it encodes: '3 \+ 40 ="
        ):
            refuse_lossy(load_tokenizer(str(broken)), str(broken))


def sentencepiece_like() -> Tokenizer:
    """Like Llama 2's and Gemma's: ▁ for a space and at the start, bytes for unknown characters."""
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {
        token: index
        for index, token in enumerate(
            ["<unk>", "<s>", "</s>", *bytes_of, "▁", *"abcdehilnopstuvwxyWI2340", "▁a", "is"]
        )
    }
    made = Tokenizer(
        models.BPE(
            vocabulary,
            [("▁", "a"), ("i", "s")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


def word_piece() -> Tokenizer:
    """Like BERT's: lower case, no accents, words and word ends, and [UNK] for other characters."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = (
        normalizers.BertNormalizer(lowercase=True),
        pre_tokenizers.BertPreTokenizer(),
    )
    made.decoder = decoders.WordPiece(cleanup=False)
    made.train_from_iterator(
        arithmetic_lines(),
        trainers.WordPieceTrainer(special_tokens=["[UNK]"], vocab_size=200, show_progress=False),
    )
    return made


def unigram() -> Tokenizer:
    """Like T5's: spaces collapse, and unknown characters become <unk>."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " ")]
    )
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.train_from_iterator(
        arithmetic_lines(),
        trainers.UnigramTrainer(
            special_tokens=["<unk>"], unk_token="<unk>", vocab_size=200, show_progress=False
        ),
    )
    return made


def characters(unknown: str | None = "<unk>") -> Tokenizer:
    """One token for each character of a domain, such as amino acids."""
    known = ["<eos>", *([unknown] if unknown else []), *"ACDEFGHIKLMNPQRSTVWY"]
    vocabulary = {token: index for index, token in enumerate(known)}
    model = models.WordLevel(vocabulary, **({"unk_token": unknown} if unknown else {}))
    made = Tokenizer(model)
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return made


def partial_bytes() -> Tokenizer:
    """A byte-level BPE that lacks the bytes of other scripts, and has no unknown token."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    made.train_from_iterator(
        arithmetic_lines(), trainers.BpeTrainer(vocab_size=120, show_progress=False)
    )
    return made


KINDS = {
    "characters": (characters, "<unk>", "ACDW"),
    "bytes": (partial_bytes, None, "3 + 40 ="),
    "sentencepiece": (sentencepiece_like, "<unk>", "What is 2 plus 40"),
    "word piece": (word_piece, "[UNK]", "What is 2 plus 40?"),
    "unigram": (unigram, "<unk>", "What is 2 plus 40?"),
}
"""Kind → how to make it, its unknown token, and a text that it covers."""


@pytest.mark.parametrize("named", [True, False], ids=["named", "not named"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_need_not_cover_all_of_unicode(kind: str, named: bool) -> None:
    """Also if the checkpoint's settings do not name its unknown token."""
    make, unknown, text = KINDS[kind]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make(), **({"unk_token": unknown} if named and unknown else {})
    )
    refuse_lossy(tokenizer, "whole")
    tokenizer_hash(tokenizer)
    coverage = Coverage(tokenizer, "whole")
    coverage.add([text], [tokenizer.encode(text, add_special_tokens=False)])
    assert coverage.notes() == []


@pytest.mark.parametrize("text", ["    return 2", "  2", " "])
def test_a_decoder_may_take_the_first_space_away(text: str) -> None:
    """Mistral's does, since its tokenizer puts a space before a text that begins with none."""
    made = sentencepiece_like()
    made.normalizer = normalizers.Sequence([])
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    coverage = Coverage(tokenizer, "whole")
    coverage.add([text], [tokenizer.encode(text)])
    assert coverage.notes() == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_decoder_is_found_by_the_texts_of_the_data(kind: str) -> None:
    make, unknown, text = KINDS[kind]
    broken = make()
    broken.decoder = None if kind == "characters" else decoders.WordPiece(prefix="a")
    broken.decoder = decoders.CTC() if kind == "word piece" else broken.decoder
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=broken, unk_token=unknown)
    with pytest.raises(TokenizerError, match="does not decode what it encodes"):
        Coverage(tokenizer, "broken").add([text], [tokenizer.encode(text)])


def test_a_note_names_what_the_model_does_not_see() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters(), unk_token="<unk>")
    tokenizer.add_special_tokens({"eos_token": "<eos>"})
    coverage = Coverage(tokenizer, "domain")
    texts = ["ACD<eos>", "ABC<eos>", "WxZ W", "<eos>"]
    coverage.add(texts, [tokenizer.encode(text) for text in texts])
    assert coverage.notes() == [
        "the tokenizer has no token for parts of 2 of 4 texts, which the model does not see: 'B',"
        " 'x', 'Z', ' '"
    ]
    words = PreTrainedTokenizerFast(tokenizer_object=word_piece(), unk_token="[UNK]")
    coverage = Coverage(words, "words")
    coverage.add(["What is Ωmega plus 2?"], [words.encode("What is Ωmega plus 2?")])
    assert coverage.notes()[0].endswith("does not see: 'Ωmega'")


def whole_bytes(normalizer: normalizers.Normalizer | None) -> PreTrainedTokenizerFast:
    """A byte-level BPE without an unknown token, as most models have it."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made = Tokenizer(models.BPE({token: index for index, token in enumerate(sorted(alphabet))}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=made)


NORMALIZERS = {
    "none": (None, "ℝ x² “quoted” 日本 \U00012000", ""),
    "NFC": (normalizers.NFC(), "cafe\u0301 ℝ", ""),
    "lower case": (normalizers.Lowercase(), "Straße ÉCOLE", ""),
    "a space before": (normalizers.Prepend(" "), "x y", ""),
    "NFKC": (
        normalizers.NFKC(),
        "ℝ ™ ℃ № x² ﬁ…",
        "'ℝ' as 'R', '™' as 'TM', '℃' as '°C', '№' as 'No', '²' as '2', '…' as '...'",
    ),
    "quotes": (normalizers.Replace("“", '"'), "“x", "'“' as '\"'"),
    "letters": (normalizers.Replace("a", "e"), "rate", "'a' as 'e'"),
    "two characters": (normalizers.Replace("--", "—"), "x -- y", "'-' as something else"),
    "removed": (normalizers.Replace("\u200d", ""), "x\u200dy", "'\\u200d' as ''"),
    "spaces as letters": (
        normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("\u200d", " ")]),
        "x²\u200dy",
        "'²' as '2', '\\u200d' as ' '",
    ),
}
"""Kind → a normalizer, a text, and what a note says of it."""


@pytest.mark.parametrize("kind", NORMALIZERS)
def test_a_note_names_what_the_model_sees_as_something_else(kind: str) -> None:
    normalizer, text, shown = NORMALIZERS[kind]
    tokenizer = whole_bytes(normalizer)
    refuse_lossy(tokenizer, kind)
    coverage = Coverage(tokenizer, kind)
    coverage.add([text], [tokenizer.encode(text)])
    assert coverage.notes() == (
        [f"the tokenizer's normalizer changes characters: the model sees {shown}"] if shown else []
    )


@pytest.mark.parametrize("named", [True, False], ids=["named", "not named"])
def test_an_unknown_token_may_be_a_character_of_texts(named: bool) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters("?"), **({"unk_token": "?"} if named else {})
    )
    coverage = Coverage(tokenizer, "domain")
    texts = ["A?C", "A☃?C", *["A?"] * TRIPS, "?☃C"]
    coverage.add(texts, [tokenizer.encode(text) for text in texts])
    assert coverage.notes() == [
        "the tokenizer has no token for parts of 2 of 259 texts, which the model does not see: '☃'"
    ]


def test_a_text_that_cannot_be_encoded_is_refused() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters(None), eos_token="<eos>")
    refuse_lossy(tokenizer, "domain")
    with pytest.raises(TokenizerError, match=r"cannot encode 'BC' \(.*UNK.*\); use texts of its"):
        encode_prompts(tokenizer, ["AC", "BC"])


def test_normalization_is_not_a_loss(llama_model: Path, tmp_path: Path) -> None:
    lower = changed(llama_model, tmp_path / "lower", normalizer={"type": "Lowercase"})
    refuse_lossy(load_tokenizer(str(lower)), str(lower))


def test_spaces_before_punctuation_stay(
    llama_model: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """By default, `clean_up_tokenization_spaces` in a checkpoint's config removes them."""
    model = shutil.copytree(tiny_model, tmp_path / "tidy")
    file = model / "tokenizer_config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"clean_up_tokenization_spaces": True})
    )
    tokenizer = load_tokenizer(str(model))
    ids = tokenizer.encode("1 , 2 . a")
    assert (
        tokenizer.decode(ids, skip_special_tokens=True) == "1, 2. a"
        and decode(tokenizer, ids) == "1 , 2 . a"
    )


def test_a_prompt_that_begins_with_bos_gets_no_second_one(llama_model: Path) -> None:
    tokenizer = load_tokenizer(str(llama_model))
    ids, own = encode_prompts(tokenizer, ["3+4=", f"{BOS}<|user|>3+4=", ""])
    assert (
        own == 1
        and [row.count(tokenizer.bos_token_id) for row in ids] == [1, 1, 1]
        and ids[1] == ids[1][:1] + tokenizer.encode("<|user|>3+4=")[1:]
    )
    assert encode_prompts(tokenizer, [f"{BOS}a"], rendered=True) == ([tokenizer.encode("a")], 0)
    assert encode_prompts(tokenizer, []) == ([], 0)


def test_an_eos_that_the_tokenizer_appends_is_removed(llama_model: Path, tmp_path: Path) -> None:
    tree = json.loads((llama_model / "tokenizer.json").read_text())["post_processor"]
    tree["single"].append({"SpecialToken": {"id": EOS, "type_id": 0}})
    tree["special_tokens"][EOS] = {"id": EOS, "ids": [2], "tokens": [EOS]}
    tokenizer = load_tokenizer(str(changed(llama_model, tmp_path / "ends", post_processor=tree)))
    assert tokenizer.encode("3+4=")[-1] == 2
    (plain, own_eos), _ = encode_prompts(tokenizer, ["3+4=", f"3+4={EOS}"])
    assert plain == tokenizer.encode("3+4=")[:-1] and own_eos[:-1] == [*plain, 2]


def test_the_tokenizers_files_are_copied_unchanged(misnamed: Path, tmp_path: Path) -> None:
    target = tmp_path / "exported"
    target.mkdir()
    save_tokenizer(str(misnamed), target)
    names = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert {file.name for file in target.iterdir()} == names
    assert filecmp.cmpfiles(misnamed, target, names, shallow=False)[0] == [*names]


def test_a_missing_directory_is_named_as_such(tmp_path: Path) -> None:
    path = str(tmp_path / "nowhere")
    with pytest.raises(TokenizerError) as refused:
        load_tokenizer(path)
    assert str(refused.value) == (
        f"model.path = {path!r}: there is no such directory; give a Hugging Face checkpoint"
        " directory"
    )
