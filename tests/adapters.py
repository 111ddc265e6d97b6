"""A small transformer that reads pictures row by row, frozen but for adapters of low rank and its head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class LowRank(nn.Module):
    """A frozen linear layer, and B·A beside it: A is drawn, B is zero: training begins with the layer itself."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.lora_B = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + inputs @ self.lora_A.T @ self.lora_B.T  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and two dense layers, with adapters at queries and values."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(size).requires_grad_(False) for _ in range(2))
        self.query, self.value = LowRank(size, size, rank), LowRank(size, size, rank)
        self.key, self.out = (nn.Linear(size, size).requires_grad_(False) for _ in range(2))
        self.up = nn.Linear(size, 4 * size).requires_grad_(False)
        self.down = nn.Linear(4 * size, size).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        normal = self.norm1(inputs)
        parts = (part(normal).unflatten(2, (2, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        inputs = inputs + self.out(mixed)
        return inputs + self.down(functional.gelu(self.up(self.norm2(inputs))))  # type: ignore[no-any-return]


class Rows(nn.Module):
    """28 rows of 28 pixels → classes."""

    def __init__(self, size: int = 64, rank: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(28, size).requires_grad_(False)
        self.places = nn.Parameter(0.1 * torch.randn(28, size), requires_grad=False)
        self.blocks = nn.Sequential(*(Block(size, rank) for _ in range(blocks)))
        self.head = nn.Linear(size, 10)

    def forward(self, images: Tensor) -> Tensor:
        rows = self.embed(images.flatten(1, 2)) + self.places
        return self.head(self.blocks(rows).mean(1))  # type: ignore[no-any-return]


def peft_rows() -> nn.Module:
    """The same with a GPT-2 of Hugging Face, from a config without any download, and peft's adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2Model

    class PeftRows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = GPT2Config(
                vocab_size=1, n_positions=28, n_embd=64, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
            )
            config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
            lora = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
            self.embed = nn.Linear(28, 64).requires_grad_(False)
            self.body, self.head = get_peft_model(GPT2Model(config), lora), nn.Linear(64, 10)

        def forward(self, images: Tensor) -> Tensor:
            hidden = self.body(inputs_embeds=self.embed(images.flatten(1, 2)), use_cache=False)
            return self.head(hidden.last_hidden_state.mean(1))  # type: ignore[no-any-return]

    return PeftRows()
