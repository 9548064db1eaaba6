"""Secrets in what a run records: none of the ways in which they come gets one through."""

import pytest

from chimera.train.tracking.masking import MASK, Masker, is_secret_name

SECRET = "sEsAmE-0pen-9f31"  # noqa: S105 - of nothing
FORMS = [
    f"https://user:{SECRET}@tracking.example:5000/x",
    f"postgresql://me:{SECRET}@db/runs",
    f"s3://bucket?X-Amz-Security-Token={SECRET}&part=1",
    f"failed with api_key={SECRET}, retrying",
    f'{{"password": "{SECRET}"}}',
    f"Authorization: Bearer {SECRET}",
    f"header 'authorization: Basic {SECRET}'",
    f"ghp_{SECRET.replace('-', '')}{'0' * 20}",
    f"hf_{SECRET.replace('-', '')}{'0' * 20}",
]


@pytest.mark.parametrize("text", FORMS)
def test_a_text_loses_its_secrets(text):
    """A secret in a URL, a query, an assignment, a header or of a known form is replaced as a whole."""
    masked = Masker().text(text)
    assert MASK in masked
    assert SECRET not in masked
    assert SECRET.replace("-", "") not in masked
    assert masked == Masker().text(masked)


def test_a_known_value_is_secret_wherever_it_stands():
    """The value of a secret variable is replaced in other texts, where nothing else gives it away."""
    masker = Masker.of_environment({"WANDB_API_KEY": SECRET, "SSH_AUTH_SOCK": "/run/agent", "DEBUG_KEY": "1"})
    assert masker.text(f"cannot log in with {SECRET}, agent /run/agent, 1 try") == (
        "cannot log in with ***, agent /run/agent, 1 try"
    )


@pytest.mark.parametrize(
    ("words", "masked"),
    [
        (["--hub-token", SECRET, "--steps", "3"], ("--hub-token", MASK, "--steps", "3")),
        ([f"--db.password={SECRET}"], (f"--db.password={MASK}",)),
        ([f"API_KEY={SECRET}", "train"], (f"API_KEY={MASK}", "train")),
        (["--data.tokenizer", "tokens.json", "--keep", "2"], ("--data.tokenizer", "tokens.json", "--keep", "2")),
        (["--token", "--resume"], ("--token", "--resume")),
        ([f"--url=ftp://a:{SECRET}@b/c"], (f"--url=ftp://{MASK}@b/c",)),
    ],
)
def test_a_command_line_loses_its_secrets(words, masked):
    """The value of a secret option goes, in one word or two; other options stay as they are."""
    assert Masker().command(words) == masked


def test_what_only_looks_secret_stays():
    """Names of options and figures that share letters with secrets, commits and ordinary URLs are left alone."""
    for name in ("tokens_per_s", "tokenizer", "monkey", "compass", "passes", "keep_checkpoints", "author"):
        assert not is_secret_name(name), name
    for text in ("https://example.org/a?page=2", "0123456789abcdef0123456789abcdef01234567", "step=3, loss=4.5"):
        assert Masker().text(text) == text


def test_nested_values_lose_theirs():
    """In a configuration as run, keys tell as well as values."""
    values = {"store": {"password": SECRET, "urls": [f"https://a:{SECRET}@b", "runs"]}, "steps": 3}
    assert Masker().values(values) == {"store": {"password": MASK, "urls": ["https://***@b", "runs"]}, "steps": 3}
