"""Makes smollm2_golden.json: greedy tokens of Hugging Face transformers on the
GGUF's own dequantised weights, float32, for 20 prompts.

    python smollm2_golden.py SmolLM2-135M-Instruct.Q4_1.gguf > smollm2_golden.json

Needs torch, transformers, gguf, accelerate.
"""
import json
import os
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = [
    "The capital of France is", "Once upon a time", "def fibonacci(n):\n", "Water boils at",
    "The three primary colors are", "In 1969, humans first", "My favourite food is", "To be, or not to be,",
    "The quick brown fox", "Photosynthesis is the process", "1, 2, 3, 4,", "Q: What is 2 + 2?\nA:",
    "Dear Sir or Madam,", "The largest ocean on Earth", "She opened the door and", "SELECT * FROM",
    "Le chat est", "The speed of light is", "An apple a day",
    "<|im_start|>user\nWhat is the capital of Italy?<|im_end|>\n<|im_start|>assistant\n",
]
STEPS = 32

path = sys.argv[1]
kw = {"gguf_file": os.path.basename(path)}
tok = AutoTokenizer.from_pretrained(os.path.dirname(path) or ".", **kw)
model = AutoModelForCausalLM.from_pretrained(os.path.dirname(path) or ".", dtype=torch.float32, **kw).eval()
out = []
with torch.no_grad():
    for prompt in PROMPTS:
        ids = tok(prompt, add_special_tokens=False).input_ids
        seq, margin = list(ids), float("inf")
        for _ in range(STEPS):
            logits = model(torch.tensor([seq])).logits[0, -1]
            top = torch.topk(logits, 2)
            margin = min(margin, (top.values[0] - top.values[1]).item())
            seq.append(int(top.indices[0]))
        out.append({"prompt": prompt, "prompt_ids": ids, "greedy_ids": seq[len(ids):], "min_margin": round(margin, 5)})
        print(prompt.strip()[:30], round(margin, 5), file=sys.stderr)
json.dump(out, sys.stdout, indent=1)
