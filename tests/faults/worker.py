"""Work that a test interrupts: `profile CACHE OUT`, `save PATH` (without end) or `save-once PATH BYTES`."""

import resource
import signal
import sys
from pathlib import Path


def profile(cache, out):
    import jax
    import jax.numpy as jnp
    import optax

    import uniap_jax

    def train_step(state, batch):
        params, opt_state = state

        def loss(params):
            x = batch
            for w in params:
                x = jnp.tanh(x @ w)
            return jnp.mean(x**2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optax.adam(1e-3).update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    params = [jnp.ones((n, n)) * 0.1 for n in (64, 64, 64)]
    graph = uniap_jax.trace(train_step, (params, optax.adam(1e-3).init(params)), jnp.ones((8, 64)))
    devices = jax.devices()[:2]
    cluster = uniap_jax.local_cluster(devices)
    found = uniap_jax.profile(graph, cluster, devices=devices, num_microbatches=1, budget_s=60.0, cache_dir=cache)
    uniap_jax.save(found, out)


def plan(seconds):
    from uniap_jax.core.plan import Certificate, LayerPlan, Plan, Prediction
    from uniap_jax.core.strategy import Strategy

    return Plan(
        num_stages=1,
        num_microbatches=1,
        schedule="gpipe",
        batch_size=8,
        stage_devices=((0, 1),),
        layers=tuple(LayerPlan(name=f"layer {i}", stage=0, strategy=Strategy(data=2)) for i in range(300)),
        prediction=Prediction(step_time_s=seconds),
        certificate=Certificate(status="feasible"),
    )


def save(path):
    from uniap_jax.core import serialize

    versions = [plan(1.0), plan(2.0)]
    print("ready", flush=True)
    while True:
        for version in versions:
            serialize.save(version, path)


def save_once(path, limit):
    from uniap_jax.core import serialize

    serialize.save(plan(1.0), path)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as a full disk: writing fails with an OSError
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.RLIM_INFINITY))
    try:
        serialize.save(plan(2.0), path)
    except OSError:
        sys.exit(7)


if __name__ == "__main__":
    verb, *arguments = sys.argv[1:]
    {"profile": profile, "save": save, "save-once": save_once}[verb](*(Path(a) if "/" in a else a for a in arguments))
