"""Small random models for the tests: every setting of the transformer, in float64."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from tinyspec.lm.config import Config
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.model import Model
from tinyspec.lm.session import Session
from tinyspec.tree import TokenTree

LLAMA = Config(
    vocab_size=13,
    d_model=16,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=4,
    d_ff=24,
    max_positions=64,
    tied=True,
)
PROMPT = [3, 1, 4, 1, 5, 9]
GPT2 = replace(
    LLAMA, norm="layer", positions="learned", activation="gelu_new", gated=False, n_kv_heads=4,
    qkv_bias=True,
    out_bias=True, mlp_bias=True, family="gpt2",
)  # fmt: skip
QWEN3 = replace(LLAMA, qk_norm=True, head_dim=6, family="qwen3")


def model(config: Config = LLAMA, seed: int = 0, dtype: torch.dtype = torch.float64) -> Model:
    """Weights large enough that every layer, position and token changes the logits; gains and
    biases too.
    """
    m = Model.random(config, seed=seed, dtype=torch.float64, scale=0.4)
    generator = torch.Generator().manual_seed(seed + 1)
    for weight in m.weights.values():
        if weight.ndim == 1:
            weight += 0.3 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    return m.to(dtype=dtype)


def forced(m: Model, ids: list[int]) -> torch.Tensor:
    """Logits after the last token by one plain pass over the whole text: the oracle."""
    return m.logits(ids)[-1]


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def tree(
    tokens: Sequence[int], parents: Sequence[int], probe: Sequence[bool] | None = None
) -> TokenTree:
    return TokenTree(tokens, parents, (None,) * len(tokens), probe or (False,) * len(tokens))


def begun(m: Model, forward_log: list[ForwardRecord] | None = None) -> Session:
    """A session that has read PROMPT."""
    session = m.session(forward_log)
    session.extend(PROMPT)
    return session


def same_cache(session: Session) -> None:
    """All but the newest slot hold what one plain pass over the text would leave there."""
    fresh = session.model.session()
    fresh.extend(session.text)
    n = len(session) - 1
    close(session.cache.store[:, :, :, :n], fresh.cache.store[:, :, :, :n])
    assert session.cache.present[:n].all()
