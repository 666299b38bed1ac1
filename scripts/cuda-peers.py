"""Peers of the CUDA backend's figures on the same GPU, through PyTorch: memory
bandwidth; scaled dot product attention by cuDNN and flash; the linears of
Llama-3-8B's shape (cuBLASLt) in CUDA graphs; Hugging Face transformers with
random bf16 weights; FlashInfer, where it is installed; NCCL's all-reduce of two GPUs. Prints one line "PEER {json}" a figure. Arguments name the
parts to run (the functions below)."""
import json
import statistics
import sys
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

H, I, V, LAYERS, QKV = 4096, 14336, 128256, 32, 6144
HEADS, KV, D = 32, 8, 128
dev = "cuda"
bf16 = torch.bfloat16


def out(name, value, unit):
    print("PEER " + json.dumps({"name": name, "value": value, "unit": unit}), flush=True)


def timed(f, runs=15):
    """Milliseconds of one call: the median."""
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


def graphed(f, inner=1):
    """Milliseconds of one call inside a CUDA graph of inner calls f(i)."""
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        f(0)
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for i in range(inner):
            f(i)
    return timed(g.replay) / inner


def memory():
    x = torch.randint(0, 255, (1 << 32,), dtype=torch.uint8, device=dev)
    y = torch.empty_like(x)
    out("copy", 2 * x.numel() / timed(lambda: y.copy_(x)) / 1e6, "GB/s")
    f = x.view(torch.float32)
    out("read", x.numel() / timed(lambda: f.sum()) / 1e6, "GB/s")


def attention():
    kinds = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    for kind, backend in kinds.items():
        for n in (2048, 8192, 32768):
            # Every query head has a K and V of its own, as both backends take them.
            q, k, v = (torch.randn(1, HEADS, n, D, dtype=bf16, device=dev) for _ in range(3))
            try:
                with sdpa_kernel(backend):
                    ms = timed(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
                out(f"attn_prefill.{kind}.{n // 1024}k", 2 * n * n * D * HEADS / ms / 1e9, "TFLOP/s")
            except RuntimeError as e:
                print(kind, n, e, file=sys.stderr)
        for name, b, n in (("b64_l4k", 64, 4096), ("b64_l1k", 64, 1024), ("b256_l1k", 256, 1024), ("b1_l8k", 1, 8192)):
            size = 2 * b * n * KV * D * 2
            sets = max(1, int(600e6 / size))  # rotate out of L2
            q = torch.randn(b, KV, HEADS // KV, D, dtype=bf16, device=dev)  # a group is as many queries of one KV head
            kv = [[torch.randn(b, KV, n, D, dtype=bf16, device=dev) for _ in range(2)] for _ in range(sets)]
            try:
                with sdpa_kernel(backend):
                    ms = graphed(lambda i: F.scaled_dot_product_attention(q, *kv[i % sets]), max(4, sets))
                out(f"attn_decode.{kind}.{name}", size / ms / 1e9 if b > 1 else ms * 1000, "TB/s" if b > 1 else "us")
            except RuntimeError as e:
                print(kind, name, e, file=sys.stderr)


def sampling():
    logits = [torch.randn(64, V, device=dev) for _ in range(3)]

    def top_p(i):
        p, order = torch.softmax(logits[i % 3] / 0.8, -1).sort(descending=True)
        p[p.cumsum(-1) - p > 0.95] = 0
        return order.gather(1, torch.multinomial(p, 1))

    out("sampler.sort", timed(lambda: [top_p(i) for i in range(3)]) / 3 * 1000, "us")


def linears():
    w = [[torch.randn(n, k, dtype=bf16, device=dev) * 0.02 for n, k in ((QKV, H), (H, H), (2 * I, H), (H, I))] for _ in range(LAYERS)]
    head = torch.randn(V, H, dtype=bf16, device=dev) * 0.02
    for m in (1, 8, 64, 256, 2048):
        a, b = torch.randn(m, H, dtype=bf16, device=dev), torch.randn(m, I, dtype=bf16, device=dev)

        def run(_=0):
            for q, o, gu, d in w:
                F.linear(a, q), F.linear(a, o), F.linear(a, gu), F.linear(b, d)
            F.linear(a[:256] if m <= 256 else a[:1], head)

        out(f"linears.b{m}", graphed(run) if m <= 256 else timed(run), "ms")


def transformers():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_default_dtype(bf16)
    with torch.device(dev):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=V, hidden_size=H, intermediate_size=I, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                                             num_key_value_heads=KV, max_position_embeddings=40960, rope_theta=500000.0, attn_implementation="sdpa")).eval()
    with torch.inference_mode():
        for n in (2048, 8192, 32768):
            ids = torch.randint(0, V, (1, n), device=dev)
            ms = timed(lambda: model(ids, logits_to_keep=1, use_cache=True), 5)
            out(f"hf_eager_prefill.{n // 1024}k", n / ms * 1000, "tok/s")
        for b in (1, 8, 64):
            past = model(torch.randint(0, V, (b, 1024), device=dev), logits_to_keep=1, use_cache=True).past_key_values
            ids = torch.randint(0, V, (b, 1), device=dev)
            out(f"hf_eager_decode.b{b}", timed(lambda: model(ids, past_key_values=past, use_cache=True), 10), "ms")
            del past


def flashinfer():
    try:
        import flashinfer as fi
    except ImportError as e:
        print(f"no FlashInfer here: {e}")
        return
    space = torch.empty(256 << 20, dtype=torch.uint8, device=dev)

    def tables(b, n):
        pages = torch.randperm(b * n // 16, dtype=torch.int32, device=dev)  # blocks of 16, shuffled
        return torch.arange(b + 1, dtype=torch.int32, device=dev) * (n // 16), pages, torch.full((b,), 16, dtype=torch.int32, device=dev)

    def pools(b, n):
        sets = max(1, int(600e6 / (2 * b * n * KV * D * 2)))  # rotate out of L2
        return [torch.randn(b * n // 16, 2, 16, KV, D, dtype=bf16, device=dev) for _ in range(sets)]

    for name, b, n in (("b64_l4k", 64, 4096), ("b64_l1k", 64, 1024), ("b256_l1k", 256, 1024), ("b1_l8k", 1, 8192)):
        w = fi.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True)
        w.plan(*tables(b, n), HEADS, KV, D, 16, q_data_type=bf16, kv_data_type=bf16)
        kv, q = pools(b, n), torch.randn(b, HEADS, D, dtype=bf16, device=dev)
        ms = graphed(lambda i: w.run(q, kv[i % len(kv)]), max(4, len(kv)))
        size = 2 * b * n * KV * D * 2
        out(f"attn_decode.flashinfer.{name}", size / ms / 1e9 if b > 1 else ms * 1000, "TB/s" if b > 1 else "us")
    for n in (2048, 8192, 32768):
        w = fi.BatchPrefillWithPagedKVCacheWrapper(space, "NHD")
        w.plan(torch.tensor([0, n], dtype=torch.int32, device=dev), *tables(1, n), HEADS, KV, D, 16, causal=True, q_data_type=bf16, kv_data_type=bf16)
        kv, q = pools(1, n)[0], torch.randn(n, HEADS, D, dtype=bf16, device=dev)
        out(f"attn_prefill.flashinfer.{n // 1024}k", 2 * n * n * D * HEADS / timed(lambda: w.run(q, kv)) / 1e9, "TFLOP/s")
    p = torch.softmax(torch.randn(64, V, device=dev) / 0.8, -1)
    out("sampler.flashinfer", timed(lambda: fi.sampling.top_p_sampling_from_probs(p, 0.95)) * 1000, "us")


def one_of(rank, port, n):
    import os
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=n, device_id=torch.device("cuda", rank))
    for name, rows in (("8k", 1), ("64k", 8), ("1m", 128), ("16m", 2048)):
        x = torch.zeros(rows, H, dtype=bf16, device="cuda")
        dist.all_reduce(x)
        us = graphed(lambda _: dist.all_reduce(x), 200) * 1000
        if rank == 0:
            out("allreduce." + name + ("" if n == 2 else f"_n{n}"), us, "us")
    dist.destroy_process_group()


def allreduce():
    """NCCL's, of two GPUs and of four; it does not put two ranks on one."""
    import socket

    if torch.cuda.device_count() < 2:
        print("no two GPUs here: NCCL refuses two ranks on one")
        return
    for n in (2, 4):
        if n > torch.cuda.device_count():
            continue
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        torch.multiprocessing.spawn(one_of, (port, n), n)


torch.manual_seed(0)
parts = (memory, attention, sampling, linears, transformers, flashinfer, allreduce)
names = sys.argv[1:] if __name__ == "__main__" else ["none"]  # or in a process that allreduce starts
for part in [p for p in parts if not names or p.__name__ in names]:
    part()
    torch.cuda.empty_cache()
