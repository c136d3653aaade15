"""A transformer with its tokenizer, its files and its sessions."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.lm import checkpoint
from tinyspec.lm.config import Config
from tinyspec.lm.engine import Engine
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.scheduler import Scheduler
from tinyspec.lm.session import Session
from tinyspec.lm.tokenizer import Tokenizer
from tinyspec.lm.transformer import Transformer
from tinyspec.tree import TokenTree


class Model(Transformer):
    """A transformer that reads and writes text."""

    def __init__(
        self,
        config: Config,
        weights: Mapping[str, Tensor],
        tokenizer: Tokenizer | None = None,
        name: str = "model",
        extras: Mapping[str, Tensor] | None = None,
    ):
        super().__init__(config, weights, name, extras)
        self._tokenizer = tokenizer

    @classmethod
    def random(
        cls, config: Config, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 0.02
    ) -> "Model":
        """Return a model with fresh normal weights of standard deviation `scale`, as GPT-2's.

        Matrices whose output is added to the residual stream are scaled by 1/sqrt(2 L).
        """
        generator = torch.Generator().manual_seed(seed)
        weights: dict[str, Tensor] = {}
        for name, shape in config.shapes().items():
            if name.endswith(".bias"):
                weights[name] = torch.zeros(shape, dtype=dtype)
            elif "norm" in name:
                weights[name] = torch.ones(shape, dtype=dtype)
            else:
                residual = name.endswith(("out.weight", "down.weight"))
                std = scale / math.sqrt(2 * config.n_layers) if residual else scale
                weights[name] = (
                    torch.randn(shape, generator=generator, dtype=torch.float64) * std
                ).to(dtype)
        return cls(config, weights)

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise TinyspecError(
                f"{self.name} has no tokenizer.json: "
                "pass token ids, or put the file into its folder"
            )
        return self._tokenizer

    def to(
        self, device: str | torch.device | None = None, dtype: torch.dtype | None = None
    ) -> "Model":
        """Return the same model on another device or in another type."""
        moved = {
            name: w.detach().to(device=device, dtype=dtype) for name, w in self.weights.items()
        }
        extras = {name: w.detach().to(device=device) for name, w in self.extras.items()}
        return Model(self.config, moved, self._tokenizer, self.name, extras)

    def with_extras(self, extras: Mapping[str, Tensor]) -> "Model":
        """Return a model with the same weights, which both share, and other extras."""
        twin = copy.copy(self.pack_weights())
        twin.extras = dict(extras)
        vars(twin).pop("_prepared", None)  # see `prepare_head`
        return twin

    def with_tokens(self, tokens: Sequence[str]) -> "Model":
        """Return a model whose vocabulary also has these special tokens.

        Their rows in the embedding and the head begin as the mean of the other rows. A matrix may
        have rows beyond the vocabulary: these do not count, and the first of them are replaced.
        """
        tokenizer = self.tokenizer.with_tokens(tokens)
        first, size = self.tokenizer.vocab_size, tokenizer.vocab_size
        config = replace(self.config, vocab_size=max(size, self.config.vocab_size))
        weights = dict(self.weights)
        for name in ("embed",) if config.tied or config.head_ids else ("embed", "head"):
            known, padding = weights[name][:first], weights[name][size:]
            mean = known.double().mean(0).to(known.dtype)
            weights[name] = torch.cat([known, mean.expand(size - len(known), -1), padding])
        return Model(config, weights, tokenizer, self.name, self.extras)

    def save(self, folder: str | Path) -> None:
        """Write a Hugging Face folder that `load` and transformers read."""
        weights = {name: w.detach().cpu() for name, w in self.weights.items()}
        checkpoint.write_checkpoint(Path(folder), self.config, weights, self._tokenizer)
        if self.extras:
            checkpoint.write_extras(folder, self.extras)

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def session(
        self, forward_log: list[ForwardRecord] | None = None, scheduler: Scheduler | None = None
    ) -> Session:
        """Return a session, for a new text. A scheduler shares its forward passes with others."""
        return Session(
            self, forward_log=forward_log, forward=scheduler.forward_of(self) if scheduler else None
        )

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Return the next-token logits after every prefix of `ids`: [len, V].

        They are float32, or float64 in a float64 model.
        """
        if isinstance(self.pack_weights()._path, Engine) and len(ids):
            session = self.session()
            session.extend(ids[:1])
            return session.score(TokenTree.chain(ids[1:])).logits
        with torch.no_grad():
            rows = self.training_logits(torch.tensor([list(ids)], device=self.device))[0]
        return rows if rows.dtype == torch.float64 else rows.float()
