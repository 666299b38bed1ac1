"""Peers of bench_test.go's figures on the same GPU: copy bandwidth, the linears
of Llama-3-8B's shape through PyTorch (cuBLASLt) in CUDA graphs, and Hugging
Face transformers with random bf16 weights. Prints one JSON line a figure."""
import json
import statistics
import torch
import torch.nn.functional as F

H, I, V, LAYERS, QKV = 4096, 14336, 128256, 32, 6144
dev = "cuda"


def out(name, value, unit):
    print("PEER " + json.dumps({"name": name, "value": value, "unit": unit}), flush=True)


def timed(f, runs=15):
    for _ in range(3):
        f()
    times = []
    for _ in range(runs):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        f()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b))
    return statistics.median(times)


torch.manual_seed(0)
x = torch.empty(1 << 32, dtype=torch.uint8, device=dev)
y = torch.empty_like(x)
out("copy", 2 * x.numel() / timed(lambda: y.copy_(x)) / 1e6, "GB/s")
del x, y

w = [[torch.randn(n, k, dtype=torch.bfloat16, device=dev) * 0.02 for n, k in ((QKV, H), (H, H), (2 * I, H), (H, I))] for _ in range(LAYERS)]
head = torch.randn(V, H, dtype=torch.bfloat16, device=dev) * 0.02


def linears(m):
    a = torch.randn(m, H, dtype=torch.bfloat16, device=dev)
    b = torch.randn(m, I, dtype=torch.bfloat16, device=dev)
    for q, o, gu, d in w:
        F.linear(a, q), F.linear(a, o), F.linear(a, gu), F.linear(b, d)
    F.linear(a[:256] if m <= 256 else a[:1], head)


for m in (1, 8, 64, 256):
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        linears(m)
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        linears(m)
    out(f"linears.b{m}", timed(g.replay), "ms")
out("linears.2k", timed(lambda: linears(2048)), "ms")
del w, head
torch.cuda.empty_cache()

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

torch.set_default_dtype(torch.bfloat16)
with torch.device(dev):
    model = LlamaForCausalLM(LlamaConfig(vocab_size=V, hidden_size=H, intermediate_size=I, num_hidden_layers=LAYERS, num_attention_heads=32,
                                         num_key_value_heads=8, max_position_embeddings=40960, rope_theta=500000.0, attn_implementation="sdpa")).eval()
with torch.inference_mode():
    for n in (2048, 8192):
        ids = torch.randint(0, V, (1, n), device=dev)
        ms = timed(lambda: model(ids, logits_to_keep=1, use_cache=True), 5)
        out(f"hf_eager_prefill.{n // 1024}k", n / ms * 1000, "tok/s")
    for b in (1, 8, 64):
        past = model(torch.randint(0, V, (b, 1024), device=dev), logits_to_keep=1, use_cache=True).past_key_values
        ids = torch.randint(0, V, (b, 1), device=dev)
        out(f"hf_eager_decode.b{b}", timed(lambda: model(ids, past_key_values=past, use_cache=True), 10), "ms")
        del past
