"""Makes quant.json and tiny-llama.{gguf,json}: reference data of an
independent implementation for the readers' tests.

    python -m venv /tmp/venv && /tmp/venv/bin/pip install gguf==0.19.0 numpy
    /tmp/venv/bin/python golden.py

quant.json       per block format: four stored blocks and their F32 values
tiny-llama.gguf  one layer, a different format for each matrix
tiny-llama.json  per tensor, under its Hugging Face name: shape and SHA-256 of
                 its F32 values with q and k in rotate-half order
"""

import base64
import hashlib
import json

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

rng = np.random.default_rng(7)
b64 = lambda a: base64.b64encode(a.tobytes()).decode()


def stored(kind, rows, cols):
    """Quantised rows. Formats without a reference quantiser get random bytes
    with sane scales: any byte pattern is a valid block."""
    if kind in (T.F32, T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0):
        return gguf.quants.quantize(rng.standard_normal((rows, cols), np.float32), kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    b = rng.integers(0, 256, (rows * cols // block, size), np.uint8)
    scale = lambda: (rng.standard_normal((len(b), 1)) * 0.01).astype(np.float16).view(np.uint8)
    if kind == T.Q6_K:
        b[:, 208:210] = scale()
    else:
        b[:, 0:2], b[:, 2:4] = scale(), scale()
    return b.reshape(rows, -1)


KINDS = [T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q4_K, T.Q5_K, T.Q6_K]
quant = {}
for kind in KINDS:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    q = stored(kind, 1, 4 * block)
    quant[kind.name] = {"type": int(kind), "block": block, "size": size, "stored": b64(q),
                        "f32": b64(gguf.quants.dequantize(q, kind).astype("<f4"))}
with open("quant.json", "w") as f:
    json.dump(quant, f, indent=1)

H, FF, HEADS, KV, DIM, VOCAB = 256, 32, 2, 1, 8, 16
w = gguf.GGUFWriter("tiny-llama.gguf", "llama")
w.add_block_count(1)
w.add_context_length(64)
w.add_embedding_length(H)
w.add_feed_forward_length(FF)
w.add_head_count(HEADS)
w.add_head_count_kv(KV)
w.add_key_length(DIM)
w.add_value_length(DIM)
w.add_rope_dimension_count(DIM)
w.add_rope_freq_base(500000.0)
w.add_layer_norm_rms_eps(1e-5)
w.add_tokenizer_model("llama")
w.add_token_list([f"t{i}" for i in range(VOCAB)])
w.add_token_scores([float(-i) for i in range(VOCAB)])
w.add_token_types([1] * VOCAB)
w.add_bos_token_id(1)
w.add_eos_token_id(2)
w.add_add_bos_token(True)
w.add_array("tokenizer.test.nested", [[1, 2], [3]])

unpermute = lambda a, heads: a.reshape(heads, DIM // 2, 2, -1).swapaxes(1, 2).reshape(a.shape)
golden = {}


def add(name, hf, kind, rows, cols, heads=0):
    shape = (rows, cols) if rows else (cols,)
    q = stored(kind, max(rows, 1), cols)
    v = gguf.quants.dequantize(q, kind).astype("<f4").reshape(shape)
    if heads:
        v = unpermute(v, heads)
    if kind == T.F16:
        q = q.view(np.float16)
    w.add_tensor(name, q if rows else q.reshape(-1), raw_dtype=kind)
    golden[hf] = {"shape": shape, "sha256": hashlib.sha256(np.ascontiguousarray(v).tobytes()).hexdigest()}


L = "model.layers.0."
add("token_embd.weight", "model.embed_tokens.weight", T.Q8_0, VOCAB, H)
add("blk.0.attn_norm.weight", L + "input_layernorm.weight", T.F32, 0, H)
add("blk.0.attn_q.weight", L + "self_attn.q_proj.weight", T.Q4_K, HEADS * DIM, H, HEADS)
add("blk.0.attn_k.weight", L + "self_attn.k_proj.weight", T.Q5_K, KV * DIM, H, KV)
add("blk.0.attn_v.weight", L + "self_attn.v_proj.weight", T.Q6_K, KV * DIM, H)
add("blk.0.attn_output.weight", L + "self_attn.o_proj.weight", T.F32, H, HEADS * DIM)
add("blk.0.ffn_norm.weight", L + "post_attention_layernorm.weight", T.F32, 0, H)
add("blk.0.ffn_gate.weight", L + "mlp.gate_proj.weight", T.Q4_1, FF, H)
add("blk.0.ffn_up.weight", L + "mlp.up_proj.weight", T.Q5_0, FF, H)
add("blk.0.ffn_down.weight", L + "mlp.down_proj.weight", T.Q5_1, H, FF)
add("output_norm.weight", "model.norm.weight", T.F32, 0, H)
w.write_header_to_file()
w.write_kv_data_to_file()
w.write_tensors_to_file()
w.close()
with open("tiny-llama.json", "w") as f:
    json.dump(golden, f, indent=1)
