"""The sizes of a transformer, one value for the four families: GPT, BERT, T5, Llama.

It knows what a model is, not what it costs (``parameters``, ``work``) nor where its layers run (``layout``). A family
sets what the other sizes do not say: which normalisations, biases, embeddings and heads the model has.
"""

from dataclasses import dataclass
from typing import Final, Literal, get_args

from chimera.errors import ConfigError, nearest_names

__all__ = ["FAMILIES", "LARGEST_SIZE", "MOST_BLOCKS", "Family", "ModelShape", "require_size"]

MOST_BLOCKS: Final = 10_000
"""More blocks than any model has: a longer list would fill the memory."""

LARGEST_SIZE: Final = 10**9
"""More than any size of a model or a layout: beyond it products of sizes have no finite time."""

Family = Literal["gpt", "bert", "t5", "llama"]
FAMILIES: Final[tuple[str, ...]] = get_args(Family)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model and the length of its sequences.

    Attributes:
        family: what blocks, embeddings and head are like.
        hidden: width h of the residual stream.
        layers: blocks; for T5 those of the decoder.
        heads: attention heads a.
        vocab: rows V of the word embedding, before any padding.
        seq: tokens s of a sequence; for T5 those of the encoder.
        kv_heads: heads of keys and values; as many as ``heads`` where not given.
        head_size: width of one head; h / a where not given.
        ffn: width of the feed-forward layer; 4 h where not given.
        gated: whether the feed-forward layer has a gate, a second matrix of its first size.
        tied: whether the head's matrix is the word embedding's.
        positions: rows of the table of learned positions (GPT, BERT); ``seq`` where not given.
        encoder_layers: blocks of a T5 encoder.
        decoder_seq: tokens of a T5 target; ``seq`` where not given.

    Raises:
        ConfigError: a size that no such model has; the message names the option.
    """

    family: Family
    hidden: int
    layers: int
    heads: int
    vocab: int
    seq: int
    kv_heads: int | None = None
    head_size: int | None = None
    ffn: int | None = None
    gated: bool = False
    tied: bool = True
    positions: int | None = None
    encoder_layers: int = 0
    decoder_seq: int | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError(
                f"model family {self.family!r} is not known{nearest_names(str(self.family), FAMILIES)}; "
                f"known: {', '.join(FAMILIES)}"
            )
        for name in ("hidden", "layers", "heads", "vocab", "seq"):
            require_size(name, getattr(self, name), most=MOST_BLOCKS if name == "layers" else LARGEST_SIZE)
        for name in ("kv_heads", "head_size", "ffn", "positions", "decoder_seq"):
            if getattr(self, name) is not None:
                require_size(name, getattr(self, name))
        if self.family == "t5":
            require_size("encoder_layers", self.encoder_layers, most=MOST_BLOCKS)
        elif self.encoder_layers != 0:
            raise ConfigError(f"--encoder-layers {self.encoder_layers}: only t5 has an encoder, not {self.family}")
        if self.head_size is None and self.hidden % self.heads:
            raise ConfigError(
                f"--hidden {self.hidden} does not divide into --heads {self.heads} equal heads; "
                f"try --hidden {self.hidden - self.hidden % self.heads or self.heads}"
            )
        if self.heads % self.num_kv_heads:
            raise ConfigError(
                f"--kv-heads {self.kv_heads} does not divide --heads {self.heads}; needed: as many query heads for "
                "each head of keys and values"
            )
        if self.decoder_seq is not None and self.family != "t5":
            raise ConfigError(f"decoder_seq is given for family {self.family!r}; only t5 has a second sequence")

    def undivided(self, tensor: int) -> str | None:
        """Return a width that ``tensor`` ranks cannot share, in words; None where they share all of them."""
        widths = {
            "attention heads": self.heads,
            "heads of keys and values": self.num_kv_heads,
            "columns of the feed-forward layer": self.ffn_width,
        }
        return next((f"{width:,} {name}" for name, width in widths.items() if width % tensor), None)

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads if self.head_size is None else self.head_size

    @property
    def query_width(self) -> int:
        """Width of all queries together: h, unless ``head_size`` says otherwise."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Width of all keys together, and of all values."""
        return self.num_kv_heads * self.head_width

    @property
    def ffn_width(self) -> int:
        """Width of the feed-forward layer."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def num_positions(self) -> int:
        """Rows of the table of learned positions; 0 where positions are rotated or relative."""
        if self.family in {"t5", "llama"}:
            return 0
        return self.seq if self.positions is None else self.positions

    @property
    def target_seq(self) -> int:
        """Tokens of the sequence that the head predicts."""
        return self.seq if self.decoder_seq is None else self.decoder_seq

    @property
    def num_blocks(self) -> int:
        """Blocks of encoder and decoder together."""
        return self.encoder_layers + self.layers

    @property
    def biases(self) -> bool:
        """Whether linear layers have a bias and normalisations an offset."""
        return self.family in {"gpt", "bert"}


def require_size(name: str, value: object, *, most: int = LARGEST_SIZE) -> None:
    """Refuse what is no whole number from 1 to ``most``; ``name`` is that of the option, underscored.

    Raises:
        ConfigError: the message names the option.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        needed = "a whole number of at least 1" if most == LARGEST_SIZE else f"a whole number from 1 to {most:,}"
        if isinstance(value, int) and value > most:
            needed = f"at most {most:,}"
        raise ConfigError(f"--{name.replace('_', '-')} {value!r}: needed: {needed}")
