"""Makes families_golden.json: what Hugging Face transformers computes, in float32, for the models
that scripts/tinymodels writes. A position has the logits that follow it.

    go run ./scripts/tinymodels FOLDER && python families_golden.py FOLDER > families_golden.json

Needs torch, transformers.
"""
import json
import os
import sys

import torch
from transformers import AutoModelForCausalLM

POSITIONS = [0, 20, 47]

out = {}
for name in sorted(os.listdir(sys.argv[1])):
    folder = os.path.join(sys.argv[1], name)
    with open(os.path.join(folder, "prompt.json")) as f:
        prompt = json.load(f)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0]
    out[name] = {str(p): [float(f"{v:.7g}") for v in logits[p].tolist()] for p in POSITIONS}
print("{")
print(",\n".join(json.dumps(k) + ": " + json.dumps(v, separators=(",", ":")) for k, v in sorted(out.items())))
print("}")
