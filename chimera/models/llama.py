"""Llama 2 and 3 as a list of layers: word embeddings, pre-RMSNorm causal blocks, and the final norm with the decoder.

The architecture of Touvron et al. 2023 (arXiv 2307.09288) and of the Llama 3 report (arXiv 2407.21783): rotary
positions, a SwiGLU feed-forward, no biases, and queries that share keys and values in groups (Ainslie et al. 2023,
arXiv 2305.13245). Equal to transformers' ``LlamaForCausalLM``. Each layer is called with the previous layer's tensors
and the micro-batch fields it lists in ``fields``. Knows nothing of stages, and shifts no labels.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from chimera.errors import ConfigError
from chimera.models.config import Family, TransformerConfig, require_count, require_divisible
from chimera.models.rotary import RotaryEmbedding, RotaryScaling
from chimera.models.transformer import BlockForm, LanguageModelHead, PreNormBlock, initialise, require_length
from chimera.tensor.dropout import dropout
from chimera.tensor.parallel import ALONE, TensorParallel
from chimera.tensor.vocabulary import Vocabulary, VocabularyEmbedding

__all__ = ["LlamaBlock", "LlamaConfig", "LlamaEmbeddings", "llama_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(TransformerConfig):
    """Sizes of a Llama; see ``TransformerConfig`` for the shared ones.

    Attributes:
        num_key_value_heads: Heads of keys and values, each shared by equally many query heads; None for one each.
        rope_theta: Base of the rotary wavelengths.
        rope_factor: How much longer the longest wavelengths are than in pre-training (Llama 3.1); None for no change.
        rope_low_frequency_factor: Original positions per wavelength below which the full factor applies.
        rope_high_frequency_factor: Original positions per wavelength above which nothing changes.
        rope_original_positions: Longest sequence of pre-training, in tokens.
    """

    family: Family = "llama"
    max_positions: int = 4096
    dropout: float = 0.0
    attention_dropout: float = 0.0
    layer_norm_eps: float = 1e-5
    tied_decoder: bool = False
    num_key_value_heads: int | None = None
    rope_theta: float = 10_000.0
    rope_factor: float | None = None
    rope_low_frequency_factor: float = 1.0
    rope_high_frequency_factor: float = 4.0
    rope_original_positions: int = 8192

    def __post_init__(self) -> None:
        TransformerConfig.__post_init__(self)  # zero-argument super() fails in a dataclass with slots
        require_count("rope_original_positions", self.rope_original_positions)
        if self.num_key_value_heads is not None:
            require_count("num_key_value_heads", self.num_key_value_heads)
            self._require_equal_groups(self.num_key_value_heads)
        if self.head_size % 2:
            raise ConfigError(
                f"[model] hidden_size = {self.hidden_size} over num_heads = {self.num_heads} gives heads of "
                f"{self.head_size} elements, which rotary positions cannot pair; change one of the two so that heads "
                "have an even size"
            )
        for option in ("rope_theta", "rope_factor"):
            value = getattr(self, option)
            if value is not None and not 1.0 <= value < float("inf"):
                raise ConfigError(f"[model] {option} = {value!r} must be a finite number of at least 1")
        if not 0.0 < self.rope_low_frequency_factor < self.rope_high_frequency_factor:
            raise ConfigError(
                f"[model] rope_low_frequency_factor = {self.rope_low_frequency_factor} must be above 0 and below "
                f"rope_high_frequency_factor = {self.rope_high_frequency_factor}; Llama 3.1 has 1 and 4"
            )

    def _require_equal_groups(self, groups: int) -> None:
        if self.num_heads % groups:
            legal = ", ".join(str(n) for n in range(1, self.num_heads + 1) if self.num_heads % n == 0)
            raise ConfigError(
                f"[model] num_key_value_heads = {groups} does not divide num_heads = {self.num_heads}; set it to one "
                f"of {legal}"
            )

    def require_shares(self, size: int) -> None:
        """Refuse what ``size`` tensor-parallel ranks cannot share equally, grouped heads included.

        Raises:
            ConfigError: Naming the option and the numbers of ranks that would do.
        """
        TransformerConfig.require_shares(self, size)
        require_divisible("num_key_value_heads", self.key_value_heads, size)

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def rotary(self) -> RotaryEmbedding:
        """What turns queries and keys."""
        scaling = None
        if self.rope_factor is not None:
            scaling = RotaryScaling(
                factor=self.rope_factor,
                low_frequency_factor=self.rope_low_frequency_factor,
                high_frequency_factor=self.rope_high_frequency_factor,
                original_positions=self.rope_original_positions,
            )
        return RotaryEmbedding(head_size=self.head_size, theta=self.rope_theta, scaling=scaling)


def llama_layers(config: LlamaConfig, parallel: TensorParallel = ALONE) -> list[nn.Module]:
    """Build the layers: ``LlamaEmbeddings``, ``num_layers`` × ``LlamaBlock``, ``LanguageModelHead``.

    With ``tied_decoder`` the first and the last layer hold the same ``Parameter``. Where tensor-parallel ranks share a
    layer, it is this rank's share.

    Raises:
        ConfigError: The ranks cannot share the layers equally.
    """
    embeddings = LlamaEmbeddings(config, parallel)
    blocks = [LlamaBlock(config, parallel) for _ in range(config.num_layers)]
    head = LanguageModelHead(config, parallel, rms=True, word=embeddings.word if config.tied_decoder else None)
    return [embeddings, *blocks, head]


class LlamaEmbeddings(nn.Module):
    """Word embeddings; positions come in with each attention."""

    fields: ClassVar[tuple[str, ...]] = ("input_ids",)

    def __init__(self, config: LlamaConfig, parallel: TensorParallel = ALONE) -> None:
        super().__init__()
        self.parallel = parallel
        self.dropout = config.dropout
        self.std = config.initializer_range
        self.max_positions = config.max_positions
        self.word = VocabularyEmbedding(Vocabulary(config.vocab_size, parallel), config.hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters again from the default generator."""
        initialise(self, std=self.std)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embed ``[b, s]`` token ids as ``[b, s, h]``, or as this rank's part of that, where the sequence is divided.

        Raises:
            ConfigError: The sequences are longer than ``max_positions``.
            UsageError: They cannot be divided equally.
        """
        require_length(input_ids.shape[1], self.max_positions)
        return dropout(self.word(input_ids), self.dropout, training=self.training, part=self.parallel.sequence_part)


class LlamaBlock(PreNormBlock):
    """One block; no position sees a later one."""

    def __init__(self, config: LlamaConfig, parallel: TensorParallel = ALONE) -> None:
        form = BlockForm(causal=True, activation="silu", gated=True, bias=False, rms_norm=True, rotary=config.rotary)
        super().__init__(config, parallel, form=form)
