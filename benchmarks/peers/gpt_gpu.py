"""Tokens per second of a GPT-2 124M train step with PyTorch on one GPU, for tools/gpu_check: bfloat16 autocast, float
parameters and AdamW state, the head tied to the embedding, sequences of 1024 tokens.

Prints a JSON line per case: {"case": "pytorch/compiled/32", "tokens_per_s": n, "peak_gib": x, "first_s": x}.
"""
import argparse
import json
import time

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 50304, 1024, 768, 12, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.attn_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c_fc, self.mlp_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(y.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, VOCABULARY).float(), targets.view(-1))


def measure(batch, compiled, steps):
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    model = GPT().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    forward = torch.compile(model) if compiled else model
    tokens, targets = (torch.randint(VOCABULARY, (batch, LENGTH), device="cuda") for _ in range(2))

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def seconds(n):
        start = time.perf_counter()
        for _ in range(n):
            step()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    first = seconds(1)
    seconds(5)
    print(json.dumps({"case": f"pytorch/{'compiled' if compiled else 'eager'}/{batch}",
                      "tokens_per_s": round(steps * batch * LENGTH / seconds(steps)),
                      "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
                      "first_s": round(first, 1)}), flush=True)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
arguments = parser.parse_args()
torch.backends.cuda.matmul.allow_tf32 = True
for batch in (4, 32):
    for compiled in (False, True):
        measure(batch, compiled, arguments.steps)
