"""GPT-2's architecture: configuration, network, initial weights, and parameter and FLOP counts.

In shape comments: B sequences, T tokens of a sequence, V vocabulary, E embedding width, H heads, D = E / H.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F  # noqa: N812  (the field's name for it)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.attention import attend
from model.dropout import add_branch, drop, site_count
from model.half_products import Linear

Init = Literal["pytorch", "gpt2"]


@dataclass(frozen=True)
class GPTConfig:
    """What distinguishes one model from another; the defaults are GPT-2 small, untied and without QKV bias.

    Raises:
        ValueError: every field that breaks its rule, in one message, as "field: rule, got value; ...".
    """

    vocab_size: int = 50257
    """Number of token ids, and rows of the token embedding."""
    context_length: int = 1024
    """Longest sequence, in tokens: rows of the position embedding."""
    emb_dim: int = 768
    """Width of the residual stream."""
    n_heads: int = 12
    """Attention heads per block; they share emb_dim evenly."""
    n_layers: int = 12
    """Blocks, each of attention and MLP."""
    dropout: float = 0.1
    """Probability of dropping an element, in training: embeddings, attention weights, residual branches."""
    qkv_bias: bool = False
    """Whether the query, key and value projections have biases, as in the original GPT-2."""
    tie_weights: bool = False
    """Whether the output head is the token embedding itself, as in the original GPT-2."""
    init: Init = "pytorch"
    """Initial weights: PyTorch's defaults for each layer, or GPT-2's normal distribution (see build_gpt)."""

    def __post_init__(self) -> None:
        """Checks all fields at once, types included: values may come from a file."""
        problems = []
        wrong_sizes = set()
        for name in ("vocab_size", "context_length", "emb_dim", "n_heads", "n_layers"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:  # type(): True is an int to isinstance
                problems.append(f"{name}: must be a positive integer, got {value!r}")
                wrong_sizes.add(name)
        if wrong_sizes.isdisjoint({"emb_dim", "n_heads"}) and self.emb_dim % self.n_heads:
            problems.append(f"emb_dim: must be divisible by n_heads ({self.n_heads}), got {self.emb_dim}")
        if type(self.dropout) not in (int, float) or not 0 <= self.dropout < 1:
            problems.append(f"dropout: must be a number from 0 to below 1, got {self.dropout!r}")
        for name in ("qkv_bias", "tie_weights"):
            value = getattr(self, name)
            if type(value) is not bool:
                problems.append(f"{name}: must be true or false, got {value!r}")
        if self.init not in get_args(Init):
            problems.append(f"init: must be one of {', '.join(get_args(Init))}, got {self.init!r}")
        if problems:
            raise ValueError("; ".join(problems))


class Attention(nn.Module):
    """Causal self-attention with several heads.

    Query, key and value are separate layers: one fused matrix would draw other initial weights.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.dropout = config.dropout
        self.context_length = config.context_length
        self.query = Linear(config.emb_dim, config.emb_dim, bias=config.qkv_bias)
        self.key = Linear(config.emb_dim, config.emb_dim, bias=config.qkv_bias)
        self.value = Linear(config.emb_dim, config.emb_dim, bias=config.qkv_bias)
        self.output = Linear(config.emb_dim, config.emb_dim)

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Mixes each position with those before it: (B, T, E) -> (B, T, E); with dropout, given keys (B, H, 2)."""
        query, key, value = (
            projection(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)  # (B, T, E) -> (B, H, T, D)
            for projection in (self.query, self.key, self.value)
        )
        mixed = attend(query, key, value, keys, self.dropout, self.context_length)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))  # (B, H, T, D) -> (B, T, E)
        return output


class MLP(nn.Module):
    """Two linear layers around GPT-2's GELU, which is the tanh approximation."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = Linear(config.emb_dim, 4 * config.emb_dim)
        self.down = Linear(4 * config.emb_dim, config.emb_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Transforms each position on its own: (B, T, E) -> (B, T, E)."""
        output: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))  # (B, T, 4E) -> (B, T, E)
        return output


class Block(nn.Module):
    """One layer: attention and MLP, each normalised before and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.emb_dim, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.emb_dim, eps=1e-5)
        self.mlp = MLP(config)
        self.dropout = config.dropout

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Adds both branches to the residual stream: (B, T, E) -> (B, T, E); with dropout, given keys (B, 2 + H, 2)."""
        of_attention, of_mlp, of_heads = (None, None, None) if keys is None else (keys[:, 0], keys[:, 1], keys[:, 2:])
        x = add_branch(x, self.attention(self.attention_norm(x), of_heads), of_attention, self.dropout)
        return add_branch(x, self.mlp(self.mlp_norm(x)), of_mlp, self.dropout)


class GPT(nn.Module):
    """The whole network, with the weights PyTorch draws when it creates the layers.

    Use build_gpt for the initial weights of a run. The order of creation decides which random numbers each
    layer gets, so a change of it changes every run.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.emb_dim)
        self.position_embedding = nn.Embedding(config.context_length, config.emb_dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.final_norm = nn.LayerNorm(config.emb_dim, eps=1e-5)
        self.head = Linear(config.emb_dim, config.vocab_size, bias=False)
        if config.tie_weights:
            self.head.weight = self.token_embedding.weight
        self.recompute_blocks = False
        """Whether a block keeps nothing but its input, and computes the rest again in the backward: the same bits."""

    def forward(self, ids: Tensor, keys: Tensor | None = None) -> Tensor:
        """Predicts the next token at each position: the logits, (B, T, V); arguments and errors are those of hidden."""
        logits: Tensor = self.head(self.hidden(ids, keys))  # (B, T, E) -> (B, T, V)
        return logits

    def hidden(self, ids: Tensor, keys: Tensor | None = None) -> Tensor:
        """Everything but the head, for callers that do not want all logits at once.

        Args:
            ids: token ids, (B, T) int64, with T at most context_length.
            keys: what the dropout masks follow from, by dropout_keys, (B, sites, 2) int32; needed in training mode if
                the config has dropout, else not looked at.

        Returns:
            The residual stream after the final norm, (B, T, E).

        Raises:
            ValueError: the sequences are longer than context_length, or keys are needed and missing or do not fit.
        """
        length = ids.shape[1]
        if length > self.config.context_length:
            raise ValueError(f"a sequence of {length} tokens does not fit context_length {self.config.context_length}")
        positions = torch.arange(length, device=ids.device)  # (T,)
        x = self.token_embedding(ids) + self.position_embedding(positions)  # (B, T) -> (B, T, E)
        if not (self.training and self.config.dropout):
            for block in self.blocks:
                x = self._through(block, x)
        else:
            of_embedding, *of_blocks = self._split_keys(keys, len(ids))
            x = drop(x, of_embedding, self.config.dropout)
            for block, of_block in zip(self.blocks, of_blocks, strict=True):
                x = self._through(block, x, of_block)
        normalised: Tensor = self.final_norm(x)
        return normalised

    def _through(self, block: nn.Module, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """A block's output; see Block.forward."""
        if self.recompute_blocks and torch.is_grad_enabled():
            # No random state to put back: dropout masks follow from the keys.
            output: Tensor = checkpoint(block, x, keys, use_reentrant=False, preserve_rng_state=False)
        else:
            output = block(x, keys)
        return output

    def _split_keys(self, keys: Tensor | None, sequences: int) -> tuple[Tensor, ...]:
        """The keys of the embedding, (B, 2), and those of each block, (B, 2 + H, 2)."""
        shape = (sequences, site_count(self.config), 2)
        if keys is None or keys.shape != shape:
            given = "none" if keys is None else f"keys of shape {tuple(keys.shape)}"
            raise ValueError(
                f"training with dropout needs keys of shape {shape}, got {given}: hand over dropout_keys(seed, step, "
                "positions, config), or call eval()"
            )
        return keys[:, 0], *keys[:, 1:].unflatten(1, (self.config.n_layers, -1)).unbind(1)


def build_gpt(config: GPTConfig, seed: int) -> GPT:
    """Builds the model with a run's initial weights: on the CPU, from `seed` alone.

    init "pytorch": what each layer draws when it is created, in the order token embedding, position
    embedding; per block query, key, value, attention output, MLP up, MLP down; head. Embeddings are N(0, 1);
    linear layers, weight before bias, are uniform within 1/sqrt(inputs). A tied head is drawn all the same,
    then dropped.

    init "gpt2": every matrix is N(0, 0.02), drawn in the same order from a generator of its own; biases are 0
    and norms 1. Neither biases nor a tied head draw, so models that differ only in qkv_bias or tie_weights
    start from the same matrices. The projections that end a residual branch (attention output, MLP down) are
    scaled by 1/sqrt(2 n_layers), as 2 n_layers branches add up (Radford et al. 2019, section 2.3).

    Args:
        config: the model's shape.
        seed: the run's seeds.weights.

    Returns:
        The model in training mode. The caller's random state is as it was.
    """
    # Not torch.manual_seed, which would reseed every GPU as well, and for good.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        model = GPT(config)
    if config.init == "gpt2":
        _draw_gpt2_weights(model, torch.Generator().manual_seed(seed))
    return model


def _draw_gpt2_weights(model: GPT, generator: torch.Generator) -> None:
    residual_std = 0.02 / math.sqrt(2 * model.config.n_layers)
    # In the order of creation, without an entry for a tied head. Norm weights, not matrices, are 1 already.
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif name.endswith(("attention.output.weight", "mlp.down.weight")):
            nn.init.normal_(parameter, std=residual_std, generator=generator)
        elif parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02, generator=generator)


def parameter_count(config: GPTConfig) -> int:
    """Number of trained values, from the shapes alone; a tied head counts once."""
    width = config.emb_dim
    embeddings = (config.vocab_size + config.context_length) * width
    attention = 4 * width * width + width + (3 * width if config.qkv_bias else 0)
    mlp = 8 * width * width + 5 * width
    norms = 4 * width
    head = 0 if config.tie_weights else config.vocab_size * width
    return embeddings + config.n_layers * (attention + mlp + norms) + 2 * width + head


def flops_per_token(config: GPTConfig) -> int:
    """Floating-point operations to train on one token: forward and backward, at full context.

    6 for every parameter but the two embedding tables, which only look up (the head counts, tied or not),
    plus 12 x layers x width x context for the attention products, with no discount for the causal mask
    (PaLM, Chowdhery et al. 2022, appendix B).
    """
    tables = config.context_length * config.emb_dim
    if not config.tie_weights:  # tied, the token table is the head, which does count
        tables += config.vocab_size * config.emb_dim
    attention = 12 * config.n_layers * config.emb_dim * config.context_length
    return 6 * (parameter_count(config) - tables) + attention
