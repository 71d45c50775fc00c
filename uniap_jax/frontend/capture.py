"""Capture of a train step: while it is traced, its one gradient call is recorded as the jaxpr of its loss.

`jax.value_and_grad` and `jax.grad` are replaced for the length of the trace by versions that trace the loss to a
jaxpr *before* differentiation and bind one primitive that holds it. The step then reads
`before -> loss_and_grad[loss jaxpr] -> update`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.interpreters import ad, batching, mlir

from uniap_jax.core.errors import TraceError
from uniap_jax.core.jax_compat import Primitive, build_jaxpr
from uniap_jax.core.jaxprs import Tape, flatten, inner_jaxprs, open_jaxpr
from uniap_jax.frontend.arguments import Arguments
from uniap_jax.frontend.axes import without_axes

loss_and_grad_p = Primitive("uniap_loss_and_grad")
loss_and_grad_p.multiple_results = True


def _abstract(*args: Any, jaxpr: Any, num_params: int) -> list[Any]:
    """`*params, *operands -> loss, *aux, *grads`."""
    return [v.aval for v in (*open_jaxpr(jaxpr).outvars, *open_jaxpr(jaxpr).invars[:num_params])]


loss_and_grad_p.def_abstract_eval(_abstract)


def _compute(*args: Any, jaxpr: Any, num_params: int) -> list[Any]:
    """What the primitive stands for: a jit inside the user's step keeps it in its cache after the capture."""

    def loss(*params: Any) -> tuple[Any, list[Any]]:
        value, *aux = jax.core.eval_jaxpr(open_jaxpr(jaxpr), (), *params, *args[num_params:])
        return value, aux

    plain, _ = _originals
    (value, aux), grads = plain(loss, argnums=tuple(range(num_params)), has_aux=True)(*args[:num_params])
    return [value, *aux, *grads]


_originals = jax.value_and_grad, jax.grad
loss_and_grad_p.def_impl(lambda *args, **params: jax.jit(lambda *a: _compute(*a, **params))(*args))
mlir.register_lowering(loss_and_grad_p, mlir.lower_fun(_compute, multiple_results=True))


def _refuse_vmap(*_: Any, **__: Any) -> Any:
    raise TraceError(
        "the gradient is taken inside `vmap`, one for each example or task, where it cannot be planned; put the vmap "
        "inside the loss and take one gradient of the mean (or sum) of what it returns",
        gradients=1,
        inside="vmap",
    )


def _refuse_jvp(*_: Any, **__: Any) -> Any:
    raise TraceError(
        "the step differentiates its gradient (a product with the Hessian), which cannot be planned; inside the loss "
        "gradients of any order can be",
        gradients=1,
        inside="jvp",
    )


batching.primitive_batchers[loss_and_grad_p] = _refuse_vmap
ad.primitive_jvps[loss_and_grad_p] = _refuse_jvp


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, **options: Any
) -> Callable[..., Any]:
    """`jax.value_and_grad` as a capture sees it; outside a capture it is `jax.value_and_grad` itself.

    For steps that bound `grad` or `value_and_grad` by `from jax import ...` before tracing.
    """

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return jax.value_and_grad(fun, argnums, has_aux, **options)(*args, **kwargs)

    return wrapped


class _Recorder:
    """One trace's gradient functions; those called while a loss is traced are part of that loss."""

    def __init__(self) -> None:
        self.in_loss = False

    @contextlib.contextmanager
    def loss(self) -> Iterator[None]:
        self.in_loss = True
        try:
            yield
        finally:
            self.in_loss = False


def _recording(recorder: _Recorder, real: Callable[..., Any], with_value: bool) -> Callable[..., Any]:
    def replacement(
        fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, **options: Any
    ) -> Callable[..., Any]:
        if options.get("holomorphic"):
            return real(fun, argnums, has_aux, **options)  # type: ignore[no-any-return]

        @functools.wraps(fun)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if recorder.in_loss:
                return real(fun, argnums, has_aux, **options)(*args, **kwargs)
            with recorder.loss():
                value, grads = _record(fun, argnums, has_aux, args, kwargs)
            if with_value:
                return value, grads
            return (grads, value[1]) if has_aux else grads

        return wrapped

    return replacement


def _record(fun: Callable[..., Any], argnums: int | Sequence[int], has_aux: bool, args: Any, kwargs: Any) -> Any:
    single = isinstance(argnums, int)
    numbers = [n % len(args) for n in ((argnums,) if isinstance(argnums, int) else argnums)]
    leaves, tree = jax.tree.flatten([args[n] for n in numbers])
    trees: list[Any] = []

    def loss(*params: Any) -> list[Any]:
        full = list(args)
        for n, value in zip(numbers, jax.tree.unflatten(tree, params), strict=True):
            full[n] = value
        out = fun(*full, **kwargs)
        value, aux = out if has_aux else (out, None)
        aux_leaves, aux_tree = jax.tree.flatten(aux)
        trees.append(aux_tree)
        return [value, *aux_leaves]

    jaxpr = jax.make_jaxpr(loss)(*leaves)
    if jaxpr.out_avals[0].shape != ():
        raise TraceError(
            f"the differentiated function returns shape {jaxpr.out_avals[0].shape}; a loss is a scalar",
            shape=jaxpr.out_avals[0].shape,
        )
    hoisted = without_axes(_hoist_consts(jaxpr))
    outs = loss_and_grad_p.bind(*leaves, *jaxpr.consts, jaxpr=hoisted, num_params=len(leaves))
    results, grads = outs[: len(jaxpr.out_avals)], outs[len(jaxpr.out_avals) :]
    value = (results[0], jax.tree.unflatten(trees[-1], results[1:])) if has_aux else results[0]
    grad_tree = jax.tree.unflatten(tree, grads)
    return value, grad_tree[0] if single else tuple(grad_tree)


def _hoist_consts(jaxpr: Any) -> Any:
    """The same jaxpr with what the loss closes over as inputs after the parameters."""
    inner = open_jaxpr(jaxpr)
    return build_jaxpr([*inner.invars, *inner.constvars], inner.outvars, inner.eqns)


_lock = threading.RLock()


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Replaces the gradient functions of `jax` for the length of a trace, and restores them whatever happens."""
    with _lock:
        saved, recorder = (jax.value_and_grad, jax.grad), _Recorder()
        jax.value_and_grad = _recording(recorder, saved[0], True)
        jax.grad = _recording(recorder, saved[1], False)
        try:
            yield
        finally:
            jax.value_and_grad, jax.grad = saved


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Captured:
    """A step as one flat tape in which equation number `loss` holds the loss.

    Attributes:
        tape: maps (state leaves, batch leaves) to the output leaves.
        loss: position of the loss among the tape's equations.
        arguments: the form of the call.
        flat: the user's own step on the same leaves, without a capture.
    """

    tape: Tape
    loss: int
    arguments: Arguments
    flat: Callable[..., list[Any]]


def unwrap(step: Callable[..., Any]) -> Callable[..., Any]:
    """The function under `jax.jit` or `nnx.jit`: a jit traced before the capture would be served from its cache."""
    inner = getattr(step, "__wrapped__", None)
    if inner is not None and type(step).__module__.split(".")[0] in ("jax", "jaxlib", "flax"):
        return unwrap(inner)
    return step


def capture(step: Callable[..., Any], arguments: Arguments) -> Captured:
    """Traces a step with its gradient call recorded.

    Raises:
        TraceError: no gradient call was found, or several, or it hides where it cannot be planned.
    """
    function = unwrap(step)

    def flat(*leaves: Any) -> list[Any]:
        count = len(arguments.state)
        args = arguments.rebuild(leaves[:count], leaves[count:])
        return arguments.result_leaves(args, function(*args))

    def trace() -> tuple[Tape, list[int]]:
        with recording():
            jaxpr = jax.make_jaxpr(flat)(*arguments.state, *arguments.batch)
        tape = flatten(jaxpr)
        return tape, [i for i, e in enumerate(tape.eqns) if e.primitive is loss_and_grad_p]

    tape, found = trace()
    if not found and not _nested(tape.eqns):
        # A jit inside the step that ran before this trace is served from its cache, differentiated already.
        jax.clear_caches()
        tape, found = trace()
    if len(found) == 1:
        return Captured(tape=tape, loss=found[0], arguments=arguments, flat=flat)
    raise _explain(tape, found)


def _nested(eqns: Sequence[Any]) -> str:
    """Name of the primitive whose body holds a recorded loss, "" where none does."""
    for eqn in eqns:
        for body in inner_jaxprs(eqn):
            inner = open_jaxpr(body).eqns
            if any(e.primitive is loss_and_grad_p for e in inner) or _nested(inner):
                return str(eqn.primitive.name)
    return ""


def _explain(tape: Tape, found: list[int]) -> TraceError:
    nested = _nested(tape.eqns)
    if nested:
        return TraceError(
            f"the gradient is taken inside `{nested}`, where it cannot be planned; take it once at the top of the "
            "step. For gradient accumulation leave the loop out and let num_microbatches do it",
            gradients=1,
            inside=nested,
        )
    if found:
        return TraceError(
            f"the step takes {len(found)} gradients; one loss can be planned. Add the losses (under "
            "jax.lax.stop_gradient what one of them must not reach), or plan the steps apart; for gradient "
            "accumulation take one gradient of the whole batch and let num_microbatches split it",
            gradients=len(found),
        )
    return TraceError(
        "no gradient was found in the step: it never calls jax.grad, jax.value_and_grad or nnx.value_and_grad. If it "
        "was bound early (`from jax import grad`), call it as jax.grad, or use uniap_jax.value_and_grad",
        gradients=0,
    )
