"""Writes rope_goldens.json: inverse frequencies and attention factors of
Hugging Face transformers' ROPE_INIT_FUNCTIONS (Apache-2.0), for TestRope.
Needs `pip install torch transformers`; values only, no code, are kept."""
import json, sys
import torch, transformers
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

cases = [
    dict(dim=64, theta=10000.0, maxpos=4096, rope=dict(rope_type="linear", factor=4.0)),
    dict(dim=128, theta=500000.0, maxpos=131072, rope=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)),
    dict(dim=64, theta=500000.0, maxpos=131072, rope=dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)),
    dict(dim=128, theta=1000000.0, maxpos=131072, rope=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)),
    dict(dim=80, theta=10000.0, maxpos=65536, rope=dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=4096, beta_fast=24.0, beta_slow=2.0, attention_factor=0.9)),
    dict(dim=64, theta=10000.0, maxpos=163840, rope=dict(rope_type="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=0.8)),
    dict(dim=64, theta=150000.0, maxpos=131072, rope=dict(rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False)),
]
out = []
for c in cases:
    kw = dict(hidden_size=c["dim"] * 4, num_attention_heads=4, head_dim=c["dim"], max_position_embeddings=c["maxpos"])
    try:
        cfg = LlamaConfig(rope_parameters=dict(c["rope"], rope_theta=c["theta"]), **kw)
        inv, factor = ROPE_INIT_FUNCTIONS[c["rope"]["rope_type"]](cfg, "cpu")
    except Exception:  # transformers 4
        cfg = LlamaConfig(rope_theta=c["theta"], rope_scaling=dict(c["rope"]), **kw)
        inv, factor = ROPE_INIT_FUNCTIONS[c["rope"]["rope_type"]](cfg, "cpu")
    out.append(dict(c, inv_freq=[float(v) for v in inv.float()], attention_factor=float(factor)))
json.dump(dict(note="transformers %s, torch %s, rope_goldens.py" % (transformers.__version__, torch.__version__.split("+")[0]), cases=out),
          open("rope_goldens.json", "w"), indent=1)
