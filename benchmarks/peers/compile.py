"""Time of a compiled train step in PyTorch (torch.compile, the step as one function) and in JAX (jit), for `tessera bench
compile`: the MLP and the small GPT of tp.py, AdamW, on the CPU with one and with two threads.

Prints a JSON line per case: {"case": "gpt/1/-/step", "value": ms, "plain": ms in eager mode}. JAX: `tools/bootstrap peers`.
Each figure is the median of several repetitions.
"""
import json
import os
import statistics
import subprocess
import sys
import time

REPETITIONS = 9


def median_ms(step, count):
    step(), step()
    samples = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        for _ in range(count):
            step()
        samples.append((time.perf_counter() - start) / count * 1e3)
    return statistics.median(samples)


def print_row(case, value, **more):
    print(json.dumps({"case": case, "value": round(value, 4)} | {k: round(v, 4) for k, v in more.items()}), flush=True)


def run_torch(threads):
    import torch

    torch.set_num_threads(threads)
    from tp import GPT, MLP, gpt_step, mlp_step

    torch.manual_seed(0)
    cases = [("gpt", 2, gpt_step, GPT)] + ([("mlp", 100, mlp_step, MLP)] if threads == 1 else [])
    for name, count, make, model in cases:
        torch._dynamo.reset()
        plain = median_ms(make(model()), count)
        variant = "step" if threads == 1 else "two_threads"
        print_row(f"{name}/1/-/{variant}", median_ms(torch.compile(make(model())), count), plain=plain)


def run_jax(threads):
    import jax
    import jax.numpy as jnp

    dim, layers, vocabulary, heads = 256, 4, 256, 4

    def initial(key):
        keys = iter(jax.random.split(key, 100))

        def linear(i, o):
            return {"w": jax.random.normal(next(keys), (i, o)) * 0.02, "b": jnp.zeros((o,))}

        def norm():
            return {"g": jnp.ones((dim,)), "b": jnp.zeros((dim,))}

        def block():
            wide = {"w1": linear(dim, 4 * dim), "w2": linear(4 * dim, dim)}
            return {"n1": norm(), "n2": norm()} | {n: linear(dim, dim) for n in "qkvo"} | wide

        embedding = jax.random.normal(next(keys), (vocabulary, dim)) * 0.02
        return {"e": embedding, "b": [block() for _ in range(layers)], "n": norm(), "out": linear(dim, vocabulary)}

    def norm(p, x):
        mean = x.mean(-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) / jnp.sqrt(variance + 1e-5) * p["g"] + p["b"]

    def linear(p, x):
        return x @ p["w"] + p["b"]

    def loss(p, tokens):
        x, target = p["e"][tokens[:, :-1]], tokens[:, 1:]
        batch, length, _ = x.shape
        mask = jnp.tril(jnp.ones((length, length), bool))
        for b in p["b"]:
            y = norm(b["n1"], x)
            q, k, v = (linear(b[n], y).reshape(batch, length, heads, 64).transpose(0, 2, 1, 3) for n in "qkv")
            scores = jax.nn.softmax(jnp.where(mask, q @ k.transpose(0, 1, 3, 2) / 8.0, -1e30), -1)
            x = x + linear(b["o"], (scores @ v).transpose(0, 2, 1, 3).reshape(batch, length, dim))
            x = x + linear(b["w2"], jax.nn.gelu(linear(b["w1"], norm(b["n2"], x)), approximate=False))
        logits = jax.nn.log_softmax(linear(p["out"], norm(p["n"], x)))
        return -jnp.take_along_axis(logits, target[..., None], -1).mean()

    @jax.jit
    def step(p, m, v, count, tokens):
        count = count + 1
        g = jax.grad(loss)(p, tokens)
        tree = jax.tree_util.tree_map
        m = tree(lambda m, g: 0.9 * m + 0.1 * g, m, g)
        v = tree(lambda v, g: 0.999 * v + 0.001 * g * g, v, g)
        size, root = 1e-3 / (1 - 0.9**count), jnp.sqrt(1 - 0.999**count)
        p = tree(lambda p, m, v: p * (1 - 1e-5) - size * m / (jnp.sqrt(v) / root + 1e-8), p, m, v)
        return p, m, v, count

    p = initial(jax.random.key(0))
    zeros = jax.tree_util.tree_map(jnp.zeros_like, p)
    state = [(p, zeros, zeros, jnp.zeros(()))]
    tokens = jax.random.randint(jax.random.key(1), (4, 129), 0, vocabulary)

    def run():
        state[0] = jax.block_until_ready(step(*state[0], tokens))

    print_row("gpt/1/-/jax" if threads == 1 else "gpt/1/-/two_threads_jax", median_ms(run, 2))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        {"torch": run_torch, "jax": run_jax}[sys.argv[1]](int(sys.argv[2]))
    else:
        for threads in (1, 2):
            cores = sorted(os.sched_getaffinity(0))[:threads]
            for peer in ("torch", "jax"):  # a process of its own: thread pools have the size of the affinity
                environment = dict(os.environ, OMP_NUM_THREADS=str(threads))
                subprocess.run([sys.executable, __file__, peer, str(threads)], check=True, env=environment,
                               preexec_fn=lambda cores=cores: os.sched_setaffinity(0, cores))
