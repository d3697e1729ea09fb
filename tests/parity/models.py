"""GPT-2 and Llama in plain torch.nn, written from their papers, without scaled_dot_product_attention. With the weights
of the C++ models they must give the same logits, loss and gradients."""
import math

import torch
import torch.nn.functional as F
from harness import respond
from torch import nn


def causal_attention(q, k, v, dropout=0.0):  # (B, H, T, D)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    mask = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool).tril()
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


class TiedHead(nn.Module):  # multiplies by the embedding's weight; a module, so that a plan can name it
    def forward(self, x, weight):
        return F.linear(x, weight)


class GPT2Attention(nn.Module):
    def __init__(self, width, heads, bias):
        super().__init__()
        self.head = width // heads
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, -1, self.head).permute(2, 0, 3, 1, 4)
        return self.c_proj(causal_attention(q, k, v).transpose(1, 2).flatten(2))


class GPT2MLP(nn.Module):
    def __init__(self, width, bias):
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.c_proj = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x):
        x = self.c_fc(x)
        x = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return self.c_proj(x)


class GPT2Block(nn.Module):
    def __init__(self, width, heads, bias):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = GPT2Attention(width, heads, bias)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = GPT2MLP(width, bias)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c["vocab_size"], c["width"])
        self.wpe = nn.Embedding(c["max_seq_len"], c["width"])
        self.h = nn.ModuleList(GPT2Block(c["width"], c["heads"], bool(c["bias"])) for _ in range(c["layers"]))
        self.ln_f = nn.LayerNorm(c["width"])
        self.lm_head = TiedHead()

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1)))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x), self.wte.weight)


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x, theta):  # (B, T, H, D), as complex numbers
    T, D = x.size(1), x.size(3)
    frequency = theta ** (-torch.arange(0, D, 2).float() / D)
    rotation = torch.polar(torch.ones(T, D // 2), torch.outer(torch.arange(T).float(), frequency))
    return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * rotation[:, None]).flatten(3)


class LlamaAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c, self.head = c, c["width"] // c["heads"]
        self.wq = nn.Linear(c["width"], c["width"], bias=False)
        self.wk = nn.Linear(c["width"], c["kv_heads"] * self.head, bias=False)
        self.wv = nn.Linear(c["width"], c["kv_heads"] * self.head, bias=False)
        self.wo = nn.Linear(c["width"], c["width"], bias=False)

    def forward(self, x):
        B, T, _ = x.shape
        shared = self.c["heads"] // self.c["kv_heads"]
        q, k, v = (w(x).view(B, T, -1, self.head) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, self.c["theta"]), rotate(k, self.c["theta"])
        k, v = (t.repeat_interleave(shared, dim=2) for t in (k, v))
        y = causal_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.wo(y.transpose(1, 2).flatten(2))


class LlamaFeedForward(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.w1 = nn.Linear(c["width"], c["ffn"], bias=False)
        self.w2 = nn.Linear(c["ffn"], c["width"], bias=False)
        self.w3 = nn.Linear(c["width"], c["ffn"], bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention = LlamaAttention(c)
        self.feed_forward = LlamaFeedForward(c)
        self.attention_norm = RMSNorm(c["width"])
        self.ffn_norm = RMSNorm(c["width"])

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok_embeddings = nn.Embedding(c["vocab_size"], c["width"])
        self.layers = nn.ModuleList(LlamaBlock(c) for _ in range(c["layers"]))
        self.norm = RMSNorm(c["width"])
        self.tied = bool(c["tied"])
        self.output = TiedHead() if self.tied else nn.Linear(c["width"], c["vocab_size"], bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.output(x, self.tok_embeddings.weight) if self.tied else self.output(x)


def model_of(text, case, tensors):
    """text is "GPT2 layers=2 width=24 ..."; weights are the tensors case/weights/..."""
    kind, *settings = text.split()
    config = {k: float(v) if k == "theta" else int(v) for k, v in (s.split("=") for s in settings)}
    model = {"GPT2": GPT2, "Llama": Llama}[kind](config)
    start = f"{case}/weights/"
    model.load_state_dict({k[len(start):]: v for k, v in tensors.items() if k.startswith(start)}, strict=True)
    return model


def loss_of(model, case, tensors):
    logits = model(tensors[f"{case}/tokens"])
    return logits, F.cross_entropy(logits.flatten(0, 1), tensors[f"{case}/targets"].flatten())


def train_step(tensors, texts):
    """For each case "name": texts[name] is the configuration; tensors name/weights/..., name/tokens, name/targets."""
    out, names = {}, {}
    for case, text in texts.items():
        model = model_of(text, case, tensors)
        logits, loss = loss_of(model, case, tensors)
        loss.backward()
        out[f"{case}/logits"], out[f"{case}/loss"] = logits.detach(), loss.detach()
        for name, p in model.named_parameters():
            out[f"{case}/grads/{name}"] = p.grad
        names[case] = " ".join(model.state_dict())
    return out, names


if __name__ == "__main__":
    respond(train_step)
