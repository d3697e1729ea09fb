"""Time of a compiled train step in PyTorch (torch.compile, the step as one function) and in JAX (jit), for `tessera bench
compile`: the MLP and the small GPT of tp.py and a Llama of similar size, AdamW, on the CPU with one and with two threads.

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


def llama_step():
    """A train step of a Llama: 256 wide, 4 layers, batch 4 x 128."""
    import torch
    import torch.nn as nn
    import torch.nn.functional as F

    dim, hidden, heads, vocabulary, length = 256, 688, 4, 256, 128
    half = dim // heads // 2
    angles = torch.outer(torch.arange(length).float(), 10000.0 ** (-torch.arange(half).float() / half))
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)

    def rotate(x):  # (B, T, H, D)
        even, odd = x.unflatten(-1, (half, 2)).unbind(-1)
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.n1, self.n2 = nn.RMSNorm(dim, 1e-5), nn.RMSNorm(dim, 1e-5)
            self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
            self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
            self.w2 = nn.Linear(hidden, dim, bias=False)

        def forward(self, x):
            batch, length, _ = x.shape
            y = self.n1(x)
            q, k, v = (m(y).view(batch, length, heads, -1) for m in (self.q, self.k, self.v))
            q, k, v = (t.transpose(1, 2) for t in (rotate(q), rotate(k), v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.o(y.transpose(1, 2).reshape(batch, length, -1))
            y = self.n2(x)
            return x + self.w2(F.silu(self.w1(y)) * self.w3(y))

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.e, self.b = nn.Embedding(vocabulary, dim), nn.ModuleList(Block() for _ in range(4))
            self.n, self.out = nn.RMSNorm(dim, 1e-5), nn.Linear(dim, vocabulary, bias=False)

        def forward(self, x):
            x = self.e(x)
            for block in self.b:
                x = block(x)
            return self.out(self.n(x))

    from tp import gpt_step

    return gpt_step(Llama())


def autocast_step(model):
    import torch
    import torch.nn.functional as F

    adam, tokens = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randint(0, 256, (4, 129))

    def step():
        adam.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        adam.step()

    return step


def run_torch(threads):
    import torch

    torch.set_num_threads(threads)
    from tp import GPT, MLP, gpt_step, mlp_step

    torch.manual_seed(0)
    variant = "step" if threads == 1 else "two_threads"
    cases = [(f"gpt/1/-/{variant}", 2, lambda: gpt_step(GPT())), (f"llama/1/-/{variant}", 2, llama_step)]
    if threads == 1:
        cases.append(("mlp/1/-/step", 100, lambda: mlp_step(MLP())))
        cases.append(("gpt/1/-/bf16_autocast", 2, lambda: autocast_step(GPT())))
        cases.append(("gpt/1/-/bf16_parameters", 2, lambda: gpt_step(GPT().to(torch.bfloat16))))
    for name, count, make in cases:
        torch._dynamo.reset()
        plain = median_ms(make(), count)
        print_row(name, median_ms(torch.compile(make()), count), plain=plain)


def run_jax(threads):
    import jax
    import jax.numpy as jnp

    dim, layers, vocabulary, heads = 256, 4, 256, 4

    def initial(key, llama):
        keys = iter(jax.random.split(key, 100))

        def linear(i, o):
            w = {"w": jax.random.normal(next(keys), (i, o)) * 0.02}
            return w if llama else w | {"b": jnp.zeros((o,))}

        def norm():
            return {"g": jnp.ones((dim,))} if llama else {"g": jnp.ones((dim,)), "b": jnp.zeros((dim,))}

        def block():
            hidden = 688 if llama else 4 * dim
            wide = {"w1": linear(dim, hidden), "w2": linear(hidden, dim)} | ({"w3": linear(dim, hidden)} if llama else {})
            return {"n1": norm(), "n2": norm()} | {n: linear(dim, dim) for n in "qkvo"} | wide

        embedding = jax.random.normal(next(keys), (vocabulary, dim)) * 0.02
        return {"e": embedding, "b": [block() for _ in range(layers)], "n": norm(), "out": linear(dim, vocabulary)}

    def norm(p, x):
        if "b" not in p:
            return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p["g"]
        mean = x.mean(-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) / jnp.sqrt(variance + 1e-5) * p["g"] + p["b"]

    def linear(p, x):
        return x @ p["w"] + p["b"] if "b" in p else x @ p["w"]

    def rotate(x, cos, sin):  # (B, T, H, D)
        even, odd = x[..., 0::2], x[..., 1::2]
        return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

    def feed_forward(b, x):
        if "w3" in b:
            return linear(b["w2"], jax.nn.silu(linear(b["w1"], x)) * linear(b["w3"], x))
        return linear(b["w2"], jax.nn.gelu(linear(b["w1"], x), approximate=False))

    def loss(p, tokens):
        x, target = p["e"][tokens[:, :-1]], tokens[:, 1:]
        batch, length, _ = x.shape
        mask = jnp.tril(jnp.ones((length, length), bool))
        angles = jnp.outer(jnp.arange(length), 10000.0 ** (-jnp.arange(32) / 32))[:, None]
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        for b in p["b"]:
            y = norm(b["n1"], x)
            q, k, v = (linear(b[n], y).reshape(batch, length, heads, 64) for n in "qkv")
            if "w3" in b:
                q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            q, k, v = (t.transpose(0, 2, 1, 3) for t in (q, k, v))
            scores = jax.nn.softmax(jnp.where(mask, q @ k.transpose(0, 1, 3, 2) / 8.0, -1e30), -1)
            x = x + linear(b["o"], (scores @ v).transpose(0, 2, 1, 3).reshape(batch, length, dim))
            x = x + feed_forward(b, norm(b["n2"], x))
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

    tokens = jax.random.randint(jax.random.key(1), (4, 129), 0, vocabulary)
    for model in ("gpt", "llama"):
        p = initial(jax.random.key(0), model == "llama")
        zeros = jax.tree_util.tree_map(jnp.zeros_like, p)
        state = [(p, zeros, zeros, jnp.zeros(()))]

        def run():
            state[0] = jax.block_until_ready(step(*state[0], tokens))

        print_row(f"{model}/1/-/jax" if threads == 1 else f"{model}/1/-/two_threads_jax", median_ms(run, 2))


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
