"""Train steps of GPT-2 124M and of a Llama of 300 M parameters with PyTorch on one GPU, for tools/gpu_check: bfloat16
autocast, float parameters and AdamW state, the head of GPT-2 tied to the embedding.

Prints a JSON line per case, {"case": "pytorch/gpt2/compiled/32", "tokens_per_s": n, "allocated_gib": x, "reserved_gib": x,
"first_s": x}, or with --losses the loss of each step on the tokens, weights and order of a run of `tessera train`.
"""
import argparse
import json
import math
import time

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 50304


class GPTBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.attn.c_attn(self.ln_1(x)).view(batch, length, 3, self.heads, -1).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn.c_proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    length, vocabulary = 1024, VOCABULARY

    def __init__(self, width=768, heads=12, layers=12):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(self.length, width)
        self.h = nn.ModuleList(GPTBlock(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, VOCABULARY).float(), targets.reshape(-1))


class LlamaBlock(nn.Module):
    def __init__(self, width, heads, kv_heads, hidden):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        kv = width // heads * kv_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, n, bias=False) for n in (width, kv, kv, width))
        self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    @staticmethod
    def rotate(x, cos, sin):  # (B, T, H, D), neighbours are a pair
        even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).type_as(x)

    def forward(self, x, cos, sin):
        batch, length, width = x.shape
        y = self.attention_norm(x)
        q, k, v = (w(y).view(batch, length, heads, -1) for w, heads in
                   ((self.wq, self.heads), (self.wk, self.kv_heads), (self.wv, self.kv_heads)))
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 2) for t in (k, v))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + self.wo(y.transpose(1, 2).reshape(batch, length, width))
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    length, vocabulary = 2048, 32000

    def __init__(self, width=1024, heads=16, kv_heads=8, hidden=2816, layers=20):
        super().__init__()
        self.tok_embeddings = nn.Embedding(self.vocabulary, width)
        self.layers = nn.ModuleList(LlamaBlock(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.output = nn.Linear(width, self.vocabulary, bias=False)
        frequency = 500000.0 ** -(torch.arange(0, width // heads, 2) / (width // heads))
        angle = torch.outer(torch.arange(self.length), frequency)[:, None]
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens, targets):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.output(self.norm(x)).view(-1, self.vocabulary).float(), targets.reshape(-1))


def make(kind, lr, betas=(0.9, 0.95), decay=0.1):
    model = {"gpt2": GPT, "llama": Llama}[kind]()
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02)
    model.cuda()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)


def train_step(model, forward, optimizer, tokens, targets):
    with torch.autocast("cuda", torch.bfloat16):
        loss = forward(tokens, targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def measure(kind, batch, compiled, steps):
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model, optimizer = make(kind, 3e-4)
    forward = torch.compile(model) if compiled else model
    tokens, targets = (torch.randint(model.vocabulary, (batch, model.length), device="cuda") for _ in range(2))

    def seconds(n):
        start = time.perf_counter()
        for _ in range(n):
            train_step(model, forward, optimizer, tokens, targets)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    first = seconds(1)
    seconds(5)
    print(json.dumps({"case": f"pytorch/{kind}/{'compiled' if compiled else 'eager'}/{batch}",
                      "tokens_per_s": round(steps * batch * model.length / seconds(steps)),
                      "allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
                      "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
                      "first_s": round(first, 1)}), flush=True)


MASK = 2**64 - 1


def splitmix64(x, y=None):
    if y is not None:
        return splitmix64(splitmix64(x) ^ y)
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def order_of_samples(samples, seed, epoch):
    """The order of tessera/data/detail/permutation.cpp."""
    key, half = splitmix64(splitmix64(seed, epoch)), 0
    while half < 31 and 1 << (2 * half) < samples:
        half += 1

    def scrambled(x):
        left, right = x >> half, x & ((1 << half) - 1)
        for r in range(6):
            left, right = right, left ^ (splitmix64((key + r) & MASK, right) & ((1 << half) - 1))
        return left << half | right

    for x in range(samples):
        x = scrambled(x)
        while x >= samples:
            x = scrambled(x)
        yield x


def losses(path, weights, batch, steps, lr, warmup):
    """The losses of `tessera train --data PATH --data.validation_path PATH --data-format uint16 --warmup N
    --schedule constant --seed 0`, from the same weights."""
    import numpy
    from safetensors.torch import load_file

    model, optimizer = make("gpt2", lr)
    missing, unexpected = model.load_state_dict(load_file(weights), strict=False)
    assert not missing and not unexpected, (missing, unexpected)
    tokens = numpy.fromfile(path, numpy.uint16)
    samples = (len(tokens) - 1) // model.length
    epoch, left = -1, []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / (min(warmup, steps) + 1))
        if len(left) < batch:
            epoch += 1
            left = list(order_of_samples(samples, 0, epoch))
        rows, left = left[:batch], left[batch:]
        windows = numpy.stack([tokens[r * model.length: (r + 1) * model.length + 1] for r in rows]).astype(numpy.int64)
        windows = torch.from_numpy(windows).cuda()
        loss = train_step(model, model, optimizer, windows[:, :-1], windows[:, 1:]).item()
        assert math.isfinite(loss)
        print(loss, flush=True)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--cases", default="gpt2/eager/4,gpt2/compiled/4,gpt2/eager/32,gpt2/compiled/32,llama/compiled/16")
parser.add_argument("--losses", help="a token file of uint16")
parser.add_argument("--weights", help="a safetensors file, for --losses")
parser.add_argument("--batch", type=int, default=4, help="for --losses")
parser.add_argument("--lr", type=float, default=3e-4, help="for --losses")
parser.add_argument("--warmup", type=int, default=0, help="for --losses: steps in which the learning rate rises")
arguments = parser.parse_args()
torch.backends.cuda.matmul.allow_tf32 = True
if arguments.losses:
    losses(arguments.losses, arguments.weights, arguments.batch, arguments.steps, arguments.lr,
           arguments.warmup)
else:
    for case in arguments.cases.split(","):
        kind, how, batch = case.split("/")
        measure(kind, int(batch), how == "compiled", arguments.steps)
