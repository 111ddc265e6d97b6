"""Networks that tell the next token at every place of a sequence: an LSTM and a small transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class CharacterLSTM(nn.Module):
    """An embedding, one LSTM, and a linear layer for the next token; [batch, length] → [batch, length, tokens]."""

    def __init__(self, tokens: int, *, embedding: int = 8, hidden: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.head = nn.Linear(hidden, tokens)

    def forward(self, sequence: Tensor) -> Tensor:
        """Return the logits of the token after each of those given."""
        outputs, _ = self.lstm(self.embedding(sequence))
        return self.head(outputs)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention to what came before, then two linear layers; each normalised first and added to what went in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mix = nn.Linear(width, width)
        self.norm_hidden = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, 4 * width)
        self.back = nn.Linear(4 * width, width)

    def forward(self, stream: Tensor) -> Tensor:
        """Return the stream with what this block adds to it."""
        batch, length, width = stream.shape
        inputs = self.norm_attention(stream)
        heads = [
            layer(inputs).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        query, key, value = heads
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.mix(attended.transpose(1, 2).reshape(batch, length, width))
        added: Tensor = self.back(functional.gelu(self.hidden(self.norm_hidden(stream))))
        return stream + added


class CharacterTransformer(nn.Module):
    """A decoder with learnt places; [batch, length] → [batch, length, tokens], length as it was built for at most."""

    def __init__(self, tokens: int, length: int, *, width: int = 64, heads: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens)

    def forward(self, sequence: Tensor) -> Tensor:
        """Return the logits of the token after each of those given."""
        places = torch.arange(sequence.shape[1], device=sequence.device)
        stream = self.blocks(self.embedding(sequence) + self.places(places))
        return self.head(self.norm(stream))  # type: ignore[no-any-return]
