"""Sizes of models from files: transformers' config.json and our configurations."""

import json
from pathlib import Path

import pytest

from chimera.errors import ConfigError, FormatError
from chimera.plan.model_file import batch_of, read_model, shape_of_hugging_face
from chimera.plan.parameters import model_parameters
from chimera.plan.shape import ModelShape

LLAMA = (
    '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, '
    '"intermediate_size": 128, "vocab_size": 100, %s}'
)
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (
            {
                "model_type": "gpt2",
                "n_embd": 768,
                "n_layer": 12,
                "n_head": 12,
                "n_positions": 1024,
                "vocab_size": 50257,
            },
            124_439_808,
        ),
        (
            {
                "model_type": "llama",
                "hidden_size": 4096,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "intermediate_size": 14336,
                "vocab_size": 128256,
                "max_position_embeddings": 131072,
            },
            8_030_261_248,
        ),
        (
            {
                "model_type": "t5",
                "d_model": 512,
                "d_kv": 64,
                "d_ff": 2048,
                "num_layers": 6,
                "num_heads": 8,
                "vocab_size": 32128,
            },
            60_506_624,
        ),
        (
            {
                "model_type": "bert",
                "hidden_size": 768,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
                "intermediate_size": 3072,
                "vocab_size": 30522,
                "max_position_embeddings": 512,
            },
            110_106_428,
        ),
    ],
    ids=["gpt2", "llama-3-8b", "t5-small", "bert-base"],
)
def test_a_published_model_has_its_published_parameters(config, parameters):
    """The shape read from config.json has as many parameters as the published weights."""
    assert model_parameters(shape_of_hugging_face(config)) == parameters


def test_our_configuration_gives_the_papers_model_and_its_batch():
    """configs/bert-48.toml is 669,790,012 parameters, 512 sequences a step."""
    assert model_parameters(read_model(CONFIGS / "bert-48.toml")) == 669_790_012
    assert batch_of(CONFIGS / "bert-48.toml") == 8 * 8 * 8


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ('{"model_type": "gptj"}', ConfigError, r"'gptj' is a family the planner does not know \(did you mean 'gpt2'"),
        ("{}", ConfigError, r"model_type is missing; needed: one of gpt2, bert, t5, llama"),
        ('{"model_type": "gpt2"}', ConfigError, r"n_positions is missing"),
        ('{"model_type": "gpt2", "n_positions": -1}', ConfigError, r"n_positions = -1; needed: a whole number"),
        ('{"model_type": ["gpt2"]}', ConfigError, r"model_type \['gpt2'\] is a family the planner does not know"),
        (
            LLAMA % '"max_position_embeddings": NaN',
            ConfigError,
            r"max_position_embeddings = nan; needed: a whole number",
        ),
        (
            LLAMA % '"max_position_embeddings": "4096"',
            ConfigError,
            r"max_position_embeddings = '4096'; needed: a whole",
        ),
        (LLAMA % '"num_key_value_heads": "8"', ConfigError, r"num_key_value_heads = '8'; needed: a whole number"),
        (LLAMA % '"tie_word_embeddings": "no"', ConfigError, r"tie_word_embeddings = 'no'; needed: true or false"),
        ("[1]", FormatError, r"holds no JSON object"),
        ("{", FormatError, r"is not a JSON file"),
        ("[" * 100_000, FormatError, r"is not a JSON file"),
    ],
)
def test_a_file_that_is_no_model_is_refused(tmp_path, content, error, message):
    """Unknown families and broken files are refused with the place and what is needed."""
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(error, match=message):
        read_model(path)


def test_a_missing_file_is_named(tmp_path):
    """The path that does not exist is in the message."""
    with pytest.raises(ConfigError, match=r"none\.json does not exist"):
        read_model(tmp_path / "none.json")


def test_a_configuration_without_a_model_is_refused(tmp_path):
    """A TOML file needs a [model] section."""
    path = tmp_path / "run.toml"
    path.write_text("[train]\nsteps = 1\n")
    with pytest.raises(ConfigError, match=r"no section \[model\]"):
        read_model(path)


def test_the_length_given_takes_the_files_place(tmp_path):
    """--seq replaces the model's longest sequence; Llama's of 131,072 tokens is planned as 4,096."""
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    path.write_text(json.dumps({"model_type": "llama", "vocab_size": 100, "max_position_embeddings": 131072, **sizes}))
    assert read_model(path).seq == 4096
    assert read_model(path, seq=8192).seq == 8192
    with pytest.raises(ConfigError, match="--seq 0: needed"):
        read_model(path, seq=0)


def test_a_null_is_as_good_as_nothing(tmp_path):
    """Keys that transformers writes as null take their defaults."""
    path = tmp_path / "config.json"
    path.write_text(LLAMA % '"max_position_embeddings": null, "num_key_value_heads": null, "head_dim": null')
    assert read_model(path) == ModelShape(
        family="llama", hidden=64, layers=2, heads=8, vocab=100, seq=4096, ffn=128, gated=True, tied=False
    )
