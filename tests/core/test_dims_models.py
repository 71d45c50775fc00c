"""Tensor splits of transformer blocks as published, leaf by leaf against Megatron's layout written by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dims_support import make_layer
from uniap_jax.core.dims import tensor_split

T = pytest.importorskip("transformers", reason="the Flax classes of transformers 4 are not installed")
pytest.importorskip("transformers.models.gpt2.modeling_flax_gpt2", reason="transformers 5 has no Flax classes")

B, S, E, H, F = 2, 6, 32, 4, 64


def split_of(module, **kwargs):
    """Sharded dimension of every parameter of a block under tensor=2, by its path."""
    x = jnp.zeros((B, S, E))
    variables = jax.eval_shape(lambda: module.init(jax.random.key(0), x, **kwargs))
    leaves, tree = jax.tree_util.tree_flatten_with_path(variables["params"])

    def f(*args):
        params = jax.tree_util.tree_unflatten(tree, args[: len(leaves)])
        return module.apply({"params": params}, args[-1], **kwargs)[0]

    layer = make_layer(f, [np.zeros(v.shape, v.dtype) for _, v in leaves], reads=[x])
    split = tensor_split(layer, 2)
    names = ["/".join(k.key for k in path) for path, _ in leaves]
    assert not [n for n in split.notes if n.startswith("no rule")]
    views = {names[v.param]: (v.dim, v.outer) for v in split.views}
    return {n: d for n, d in zip(names, split.params, strict=True) if d is not None}, views


def test_gpt2_block():
    from transformers.models.gpt2.modeling_flax_gpt2 import FlaxGPT2Block

    config = T.GPT2Config(n_embd=E, n_head=H, n_inner=F, n_positions=S)
    sharded, views = split_of(FlaxGPT2Block(config), deterministic=True)
    assert sharded == {
        "attn/c_proj/kernel": 1,  # this Dense stores its kernel transposed
        "mlp/c_fc/kernel": 0,
        "mlp/c_fc/bias": 0,
        "mlp/c_proj/kernel": 1,
    }
    assert views == {"attn/c_attn/kernel": (0, 3), "attn/c_attn/bias": (0, 3)}


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_llama_block(kv_heads):
    from transformers.models.llama.modeling_flax_llama import FlaxLlamaDecoderLayer

    config = T.LlamaConfig(
        hidden_size=E,
        num_attention_heads=H,
        num_key_value_heads=kv_heads,
        intermediate_size=F,
        max_position_embeddings=64,
    )
    position = jnp.arange(S)[None]
    sharded, views = split_of(FlaxLlamaDecoderLayer(config), position_ids=position, attention_mask=jnp.ones((B, S)))
    columns = ("self_attn/q_proj", "self_attn/k_proj", "self_attn/v_proj", "mlp/gate_proj", "mlp/up_proj")
    rows = ("self_attn/o_proj", "mlp/down_proj")
    assert sharded == {**{f"{n}/kernel": 1 for n in columns}, **{f"{n}/kernel": 0 for n in rows}}
    assert views == {}


def test_bert_layer():
    from transformers.models.bert.modeling_flax_bert import FlaxBertLayer

    config = T.BertConfig(hidden_size=E, num_attention_heads=H, intermediate_size=F)
    mask = jnp.ones((B, S))
    sharded, _ = split_of(FlaxBertLayer(config), attention_mask=mask, layer_head_mask=None, deterministic=True)
    columns = ("attention/self/query", "attention/self/key", "attention/self/value", "intermediate/dense")
    rows = {"attention/output/dense/kernel": 0, "output/dense/kernel": 0}
    assert sharded == {**{f"{n}/kernel": 1 for n in columns}, **{f"{n}/bias": 0 for n in columns}, **rows}


def test_vit_layer():
    from transformers.models.vit.modeling_flax_vit import FlaxViTLayer

    config = T.ViTConfig(hidden_size=E, num_attention_heads=H, intermediate_size=F)
    sharded, _ = split_of(FlaxViTLayer(config), deterministic=True)
    assert {n: d for n, d in sharded.items() if n.endswith("kernel")} == {
        "attention/attention/query/kernel": 1,
        "attention/attention/key/kernel": 1,
        "attention/attention/value/kernel": 1,
        "attention/output/dense/kernel": 0,
        "intermediate/dense/kernel": 1,
        "output/dense/kernel": 0,
    }
