import json
import subprocess
import sys

import pytest

from chimera.data import WordPiece, train_wordpiece
from chimera.data.tokenizer import SPECIAL_TOKENS
from chimera.errors import ConfigError, DataError

SENTENCES = [
    "The cat sat on the mat.",
    "The dog saw the cat, and the cat saw the dog.",
    "Cats and dogs sat and sang.",
    "A singing cat is a sad cat.",
    "Élan and éclat.",
] * 3


@pytest.fixture(scope="module")
def trained():
    return train_wordpiece(SENTENCES, vocab_size=60)


def test_a_trained_vocabulary_starts_with_the_special_tokens(trained):
    """[PAD] is 0 and the others follow in order; the size is the one asked for."""
    tokens = trained.tokens()
    assert [tokens[token] for token in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    vocabulary = trained.vocabulary
    assert (vocabulary.pad, vocabulary.unknown, vocabulary.classify) == (0, 1, 2)
    assert (vocabulary.separate, vocabulary.mask) == (3, 4)
    assert vocabulary.size == 60
    assert sorted(tokens.values()) == list(range(60))
    assert vocabulary.special == (0, 1, 2, 3, 4)


def test_text_goes_through_the_vocabulary_and_back(trained):
    """Ids decode to the lower-cased text, with accents stripped."""
    (ids,) = trained.encode(["The CAT sang, élan!"])
    assert trained.decode(ids) == "the cat sang, elan [UNK]"


def test_case_is_kept_when_asked():
    """Without lower-casing, capitals and accents are characters of their own."""
    tokenizer = train_wordpiece(SENTENCES, vocab_size=60, lowercase=False)
    (ids,) = tokenizer.encode(["The Élan"])
    assert tokenizer.decode(ids) == "The Élan"


def test_text_that_looks_like_a_special_token_is_ordinary(trained):
    """No sentence gives the id of [MASK], [SEP] or [CLS], however it is written."""
    (ids,) = trained.encode(["[MASK] the [SEP] cat [CLS] [PAD]"])
    assert not set(ids) & {0, 2, 3, 4}


def test_a_tokenizer_json_that_knows_special_tokens_does_not_find_them_in_text(trained):
    """Published tokenizers mark their special tokens; those in a sentence are ordinary text all the same."""
    content = json.loads(trained.to_json())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"] = [{"id": number, "content": token, **flags} for number, token in enumerate(SPECIAL_TOKENS)]
    marked = WordPiece.from_json(json.dumps(content))
    assert marked.vocabulary == trained.vocabulary
    text = ["the [MASK] [SEP] cat[CLS]", *SENTENCES]
    assert marked.encode(text) == trained.encode(text)


def test_training_is_the_same_in_every_process(tmp_path):
    """Two trainings in this process and one in another, with other hash seeds, number every token alike."""
    here = [json.dumps(train_wordpiece(SENTENCES, vocab_size=60).tokens(), sort_keys=True) for _ in range(5)]
    program = (
        "import json, sys; from chimera.data.tokenizer import train_wordpiece;"
        "print(json.dumps(train_wordpiece(json.load(sys.stdin), vocab_size=60).tokens(), sort_keys=True))"
    )
    there = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(SENTENCES), capture_output=True, text=True, check=True
    )
    assert {*here, there.stdout.strip()} == {here[0]}


def test_a_size_the_corpus_cannot_give_is_refused():
    """Too large and too small sizes are named with the size that is possible."""
    with pytest.raises(DataError, match=r"gives only (\d+) different word pieces, data.vocab_size asks for 5000"):
        train_wordpiece(SENTENCES, vocab_size=5000)
    with pytest.raises(DataError, match=r"data.vocab_size is 9, but the special tokens and the characters"):
        train_wordpiece(SENTENCES, vocab_size=9)


def test_the_size_named_as_possible_is_possible():
    """The refusal's advice can be followed."""
    with pytest.raises(DataError) as caught:
        train_wordpiece(SENTENCES, vocab_size=5000)
    possible = int(str(caught.value).split("only ")[1].split()[0])
    assert train_wordpiece(SENTENCES, vocab_size=possible).vocabulary.size == possible


def test_a_vocabulary_file_gives_its_lines_as_ids(tmp_path):
    """Ids are line numbers, wherever the special tokens stand; placeholders count as special."""
    path = tmp_path / "vocab.txt"
    path.write_text("[PAD]\n[unused0]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\ncat\n##s\n")
    tokenizer = WordPiece.from_file(path)
    assert tokenizer.encode(["The cats dog"]) == [[6, 7, 8, 2]]
    assert tokenizer.vocabulary.size == 9
    assert tokenizer.vocabulary.special == (0, 1, 2, 3, 4, 5)
    assert WordPiece.from_file(path, lowercase=False).encode(["The cats"]) == [[2, 7, 8]]


def test_a_tokenizer_json_reads_back(tmp_path, trained):
    """A saved tokenizer gives the same ids, and its truncation and padding are switched off."""
    path = tmp_path / "tokenizer.json"
    content = json.loads(trained.to_json())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(content))
    assert WordPiece.from_file(path).encode(SENTENCES) == trained.encode(SENTENCES)
    with pytest.raises(ConfigError, match=r"data.lowercase is True, but .*tokenizer.json, which says itself"):
        WordPiece.from_file(path, lowercase=True)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.txt", "[PAD]\n[UNK]\nthe\n[SEP]\n", r"lacks \[CLS\], \[MASK\] of the special tokens"),
        ("vocab.txt", "[PAD]\n[UNK]\nthe\n\n[CLS]\n", "line 4 is empty"),
        ("vocab.txt", "[PAD]\n[UNK]\nthe\nthe\n", "line 4 repeats 'the' of line 3"),
        ("tokenizer.json", "[PAD]\n", "is not a tokenizer.json"),
    ],
)
def test_a_broken_vocabulary_is_explained(tmp_path, name, content, message):
    """What is missing, empty, repeated or no vocabulary at all is named."""
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        WordPiece.from_file(path)


def test_a_vocabulary_that_is_not_there_is_named(tmp_path):
    """Missing files, folders and binary files are told apart."""
    with pytest.raises(DataError, match=r"vocab\.txt does not exist; set data\.vocabulary"):
        WordPiece.from_file(tmp_path / "vocab.txt")
    with pytest.raises(DataError, match="is a folder"):
        WordPiece.from_file(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="is not UTF-8"):
        WordPiece.from_file(tmp_path / "binary")
