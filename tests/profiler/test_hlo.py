import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uniap_jax.profiler.hlo import arrays_of, group_of, read_program

TPU = """
HloModule jit_f, is_scheduled=true

%all-reduce-scatter (input: f32[768,768]) -> f32[192,768] {
  %input = f32[768,768]{1,0:T(8,128)} parameter(0)
  %all-reduce.18 = f32[768,768]{1,0:T(8,128)} all-reduce(%input), channel_id=20, \
replica_groups={{0,4,8,12},{1,5,9,13},{2,6,10,14},{3,7,11,15}}, to_apply=%add
  ROOT %dynamic-slice.1 = f32[192,768]{1,0:T(8,128)} dynamic-slice(%all-reduce.18), dynamic_slice_sizes={192,768}
}

%started (p: bf16[192,192]) -> bf16[192,768] {
  %p = bf16[192,192]{0,1:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.31 = bf16[192,768]{0,1:T(8,128)(2,1)} all-gather(%p), channel_id=5, \
replica_groups=[4,4]<=[4,4]T(1,0), dimensions={1}, frontend_attributes={chain_id="0"}
}

%going_on (q: bf16[192,192]) -> bf16[192,768] {
  %q = bf16[192,192]{0,1:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.33 = bf16[192,768]{0,1:T(8,128)(2,1)} all-gather(%q), channel_id=5, \
replica_groups=[4,4]<=[4,4]T(1,0), dimensions={1}, frontend_attributes={chain_id="0"}
}

%product (x: bf16[8,16], y: bf16[16,32]) -> f32[8,32] {
  %x = bf16[8,16]{1,0} parameter(0)
  %y = bf16[16,32]{1,0} parameter(1)
  ROOT %dot.1 = f32[8,32]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%taken (stack: f32[10,100], at: s32[]) -> f32[1,100] {
  %stack = f32[10,100]{1,0} parameter(0)
  %at = s32[] parameter(1)
  ROOT %dynamic-slice.2 = f32[1,100]{1,0} dynamic-slice(%stack, %at), dynamic_slice_sizes={1,100}
}

%body (t: (bf16[8,16], bf16[16,32])) -> (bf16[8,16], bf16[16,32]) {
  %t = (bf16[8,16]{1,0}, bf16[16,32]{1,0}) parameter(0)
  %a = bf16[8,16]{1,0} get-tuple-element(%t), index=0
  %b = bf16[16,32]{1,0:S(1)} get-tuple-element(%t), index=1
  %fusion.7 = f32[8,32]{1,0} fusion(%a, %b), kind=kOutput, calls=%product, \
backend_config={"window_config":{"estimated_cycles":"100"}}
  ROOT %r = (bf16[8,16]{1,0}, bf16[16,32]{1,0}) tuple(%a, %b)
}

%turns (t: (bf16[8,16], bf16[16,32])) -> pred[] {
  %t2 = (bf16[8,16]{1,0}, bf16[16,32]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (i: f32[768,768], w: bf16[192,192], v: (bf16[8,16], bf16[16,32]), s: f32[10,100], n: s32[]) -> f32[1,100] {
  %i = f32[768,768]{1,0:T(8,128)} parameter(0)
  %w = bf16[192,192]{0,1:T(8,128)(2,1)} parameter(1)
  %v = (bf16[8,16]{1,0}, bf16[16,32]{1,0}) parameter(2)
  %s = f32[10,100]{1,0} parameter(3)
  %n = s32[] parameter(4)
  %fusion.1 = f32[192,768]{1,0:T(8,128)} fusion(%i), kind=kCustom, calls=%all-reduce-scatter
  %fusion.2 = bf16[192,768]{0,1} fusion(%w), kind=kCustom, calls=%started
  %fusion.3 = bf16[192,768]{0,1} fusion(%w), kind=kCustom, calls=%going_on
  %loop = (bf16[8,16]{1,0}, bf16[16,32]{1,0}) while(%v), condition=%turns, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  %odd = f32[4]{0} add(%n, %n), backend_config={"estimated_cycles":"9223372036854775807"}
  ROOT %fusion.4 = f32[1,100]{1,0} fusion(%s, %n), kind=kLoop, calls=%taken
}
"""


def test_a_program_as_the_tpu_compiler_writes_it():
    found = read_program(TPU)
    scatter, gather = found.collectives
    assert (scatter.kind, scatter.size, scatter.stride, scatter.nbytes) == ("reduce_scatter", 4, 4, 4 * 768 * 768)
    assert (gather.kind, gather.size, gather.stride, gather.nbytes) == ("all_gather", 4, 4, 2 * 192 * 768)
    assert gather.hidden  # it runs on through several kernels, and counts once
    assert not scatter.hidden
    assert found.total("flops") == 5 * 2 * 8 * 32 * 16
    assert found.total("cycles") == 5 * 100  # the largest integer is no estimate
    (product,) = [k for k in found.kernels if k.flops]
    assert product.nbytes == 2 * 8 * 16 + 4 * 8 * 32  # what lies on the chip is not read from memory
    assert found.kernels[-1].nbytes == 2 * 400 + 4  # the slice, not the stack


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("replica_groups=[2,4]<=[8], dimensions={0}", (4, 1)),
        ("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", (2, 4)),
        ("replica_groups={{0,2},{1,3}}, x", (2, 2)),
        ("replica_groups=mesh['x0'=2,'x1'=2,'x2'=2] {'x0','x2'}, x", (4, 1)),
        ("replica_groups=mesh['data'=4,'tensor'=2]{'data'}", (4, 2)),
        ("replica_groups=mesh['data'=8] {'data':(2)2}, x", (2, 2)),
        ("source_target_pairs={{0,2},{2,0}}", (2, 2)),
        ("dimensions={0}", (1, 1)),
    ],
)
def test_groups_in_every_syntax(text, group):
    assert group_of(text) == group


GPU = """
HloModule jit_f, is_scheduled=true

%gemm_fusion_dot_computation (parameter_0: bf16[16,8,32], parameter_1: bf16[8,32,128]) -> f32[8,16,128] {
  %parameter_1 = bf16[8,32,128]{2,1,0} parameter(1)
  %parameter_0 = bf16[16,8,32]{2,1,0} parameter(0)
  %dot.14 = f32[8,128,16]{1,2,0} dot(%parameter_1, %parameter_0), lhs_batch_dims={0}, lhs_contracting_dims={1}, \
rhs_batch_dims={1}, rhs_contracting_dims={2}, backend_config={"sizes":["16"]}
  ROOT %bitcast.3 = f32[8,16,128]{2,1,0} bitcast(%dot.14)
}

ENTRY %main (x: bf16[8,32,32,32], w: bf16[64,3,3,32], a: bf16[16,8,32], b: bf16[8,32,128]) -> f32[8,16,128] {
  %x = bf16[8,32,32,32]{3,2,1,0} parameter(0)
  %w = bf16[64,3,3,32]{3,2,1,0} parameter(1)
  %a = bf16[16,8,32]{2,1,0} parameter(2)
  %b = bf16[8,32,128]{2,1,0} parameter(3)
  %cudnn-conv.1 = (bf16[8,32,32,64]{3,2,1,0}, u8[0]{0}) custom-call(%x, %w), window={size=3x3 pad=1_1x1_1}, \
dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
  %y = bf16[8,32,32,64]{3,2,1,0} get-tuple-element(%cudnn-conv.1), index=0
  %cudnn-conv-bw-filter.1 = (bf16[64,3,3,32]{3,2,1,0}, u8[0]{0}) custom-call(%x, %y), \
window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardFilter"
  %cudnn-conv-bw-input.1 = (bf16[8,32,32,32]{3,2,1,0}, u8[0]{0}) custom-call(%y, %w), \
window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardInput"
  %all-gather-start = (bf16[16,8,32]{2,1,0}, bf16[32,8,32]{2,1,0}) all-gather-start(%a), channel_id=1, \
replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, dimensions={0}, \
backend_config={"collective_backend_config":{"is_sync":true}}
  %all-gather-done = bf16[32,8,32]{2,1,0} all-gather-done(%all-gather-start)
  %reduce-scatter-start = ((bf16[8,32,128]{2,1,0}), bf16[1,32,128]{2,1,0}) reduce-scatter-start(%b), channel_id=2, \
replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}, \
backend_config={"collective_backend_config":{"is_sync":false}}
  %reduce-scatter-done = bf16[1,32,128]{2,1,0} reduce-scatter-done(%reduce-scatter-start)
  ROOT %gemm_fusion_dot = f32[8,16,128]{2,1,0} fusion(%a, %b), kind=kCustom, calls=%gemm_fusion_dot_computation
}
"""


def test_a_program_as_the_gpu_compiler_writes_it():
    found = read_program(GPU)
    convolutions = [k.flops for k in found.kernels if k.opcode == "custom-call"]
    assert convolutions == [2 * 8 * 32 * 32 * 64 * 9 * 32] * 3  # the same product three ways
    assert found.kernels[-1].flops == 2 * 16 * 128 * 8 * 32
    assert found.kernels[-1].dtype == "bf16"  # at the rate of what it takes, not of the parts it sums
    gather, scatter = found.collectives
    assert (gather.kind, gather.size, gather.stride, gather.hidden) == ("all_gather", 2, 4, False)  # it is waited for
    assert gather.nbytes == 2 * 2 * 16 * 8 * 32
    assert (scatter.kind, scatter.size, scatter.hidden) == ("reduce_scatter", 8, True)
    assert scatter.nbytes == 2 * 8 * 32 * 128


def test_types():
    tokens, tuple_ = arrays_of("token[]"), arrays_of("(f32[4,8]{1,0:T(8,128)S(1)}, pred[], f8e4m3fn[3])")
    assert tokens[0].nbytes == 0
    assert [a.nbytes for a in tuple_] == [128, 1, 3]
    assert [a.memory_bytes for a in tuple_] == [0, 1, 3]


def test_text_without_a_program():
    with pytest.raises(ValueError, match="ENTRY"):
        read_program("HloModule nothing")


def test_a_compiled_program_of_this_machine():
    """Two products, the weight gathered and the result reduced: FLOPs by hand, groups as laid out."""
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("a", "b"))

    def f(x, w, u):
        w = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, PartitionSpec()))
        return jnp.tanh(x @ w) @ u

    def arg(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    out = NamedSharding(mesh, PartitionSpec("a"))
    lowered = jax.jit(f, out_shardings=out).lower(arg((64, 32), "a"), arg((32, 128), "a"), arg((128, 16), "b"))
    found = read_program(lowered.compile().as_text())
    assert found.total("flops") == 2 * (16 * 128 * 32 / 2 + 16 * 64 * 16)  # the first product is cut by u's split
    kinds = {(c.kind, c.size, c.stride) for c in found.collectives}
    assert ("all_reduce", 2, 1) in kinds
    assert any(k == "all_gather" and s == 4 for k, s, _ in kinds)
