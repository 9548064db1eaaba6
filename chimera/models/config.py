"""What every transformer of this package is sized by, and the checks on it.

Knows the options all architectures share, with the names they have in a ``[model]`` section. An architecture adds its
own options in its own file. Knows no layers and no torch.
"""

import math
from dataclasses import dataclass
from typing import Literal

from chimera.errors import ConfigError

__all__ = ["Family", "TransformerConfig", "require_count", "require_divisible"]


Family = Literal["bert", "gpt", "llama", "t5", "ict"]
"""An architecture by name; each has a configuration class of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """Sizes of a transformer; the fields are the keys of the ``[model]`` section.

    Attributes:
        family: Architecture; each has its own further options and defaults.
        vocab_size: Rows of the word embedding, padding of the vocabulary included.
        hidden_size: Width h of the residual stream.
        num_layers: Number of transformer blocks.
        num_heads: Attention heads; must divide ``hidden_size``.
        intermediate_size: Width of the feed-forward layer; None means 4·h.
        max_positions: Longest sequence, in tokens.
        dropout: Probability on embeddings and on both residual branches.
        attention_dropout: Probability on the attention weights.
        initializer_range: Standard deviation of initial weights.
        layer_norm_eps: Added to the variance, or the mean square, in every norm.
        tied_decoder: Whether the decoder's weight is the word embedding's.

    Raises:
        ConfigError: A size that cannot be built; the message names the option.
    """

    family: Family = "bert"
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int | None = None
    max_positions: int = 512
    dropout: float = 0.1
    attention_dropout: float = 0.1
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    tied_decoder: bool = True

    def __post_init__(self) -> None:
        own = type(self).__dataclass_fields__["family"].default
        if self.family != own:
            raise ConfigError(f"[model] family = {self.family!r} does not fit a {type(self).__name__}; leave it out")
        for option in ("vocab_size", "hidden_size", "num_layers", "num_heads", "max_positions"):
            require_count(option, getattr(self, option))
        if self.intermediate_size is not None:
            require_count("intermediate_size", self.intermediate_size, hint=" (leave it out for 4 × hidden_size)")
        self.require_equal_heads()
        for option in ("dropout", "attention_dropout"):
            value = getattr(self, option)
            if not 0.0 <= value < 1.0:
                raise ConfigError(
                    f"[model] {option} = {value!r} is no probability; give a number in [0, 1), 0 for none"
                )
        for option in ("initializer_range", "layer_norm_eps"):
            value = getattr(self, option)
            if not (value > 0.0 and math.isfinite(value)):
                raise ConfigError(f"[model] {option} = {value!r} must be a finite number above 0")

    def require_equal_heads(self) -> None:
        """Refuse heads of unequal size.

        Raises:
            ConfigError: Naming sizes that would do.
        """
        rest = self.hidden_size % self.num_heads
        if rest == 0:
            return
        legal = [size for size in (self.hidden_size - rest, self.hidden_size - rest + self.num_heads) if size > 0]
        raise ConfigError(
            f"[model] hidden_size = {self.hidden_size} does not divide into num_heads = {self.num_heads} equal heads; "
            f"try hidden_size = {' or '.join(map(str, legal))}, or a num_heads that divides {self.hidden_size}"
        )

    def require_shares(self, size: int) -> None:
        """Refuse what ``size`` tensor-parallel ranks cannot share equally.

        Raises:
            ConfigError: Naming the option and the numbers of ranks that would do.
        """
        for option, value in (("num_heads", self.num_heads), ("intermediate_size", self.feed_forward_size)):
            require_divisible(option, value, size)

    @property
    def stacks(self) -> tuple[int, ...]:
        """Blocks of each stack: layers are an embedding and its blocks, stack after stack, and a head."""
        return (self.num_layers,)

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_heads

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values: as many as of queries, where groups of these do not share them."""
        return self.num_heads

    @property
    def feed_forward_size(self) -> int:
        """Width of the feed-forward layer: ``intermediate_size``, or 4·h where that is None."""
        return 4 * self.hidden_size if self.intermediate_size is None else self.intermediate_size


def require_divisible(option: str, value: int, size: int) -> None:
    """Raise ``ConfigError`` naming ``option`` unless ``size`` tensor-parallel ranks divide its value."""
    if value % size:
        legal = ", ".join(str(n) for n in range(1, value + 1) if value % n == 0)
        raise ConfigError(
            f"[model] {option} = {value} does not divide over [parallel] tensor = {size} ranks; set tensor to one of "
            f"{legal}, or {option} to a multiple of {size}"
        )


def require_count(option: str, value: object, *, hint: str = "") -> None:
    """Raise ``ConfigError`` naming ``option`` unless ``value`` is a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"[model] {option} = {value!r} must be a whole number of at least 1{hint}")
