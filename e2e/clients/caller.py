"""Makes a small Llama that calls tools, for the tests of clients.

Usage: caller.py STORIES INTO   from the folder of stories260k, whose tokenizer it takes.

Its layers add nothing, so the next token depends on the last one alone. Its own tokens are pieces of a
thought, of two calls and of an answer, each of which leads to the next. The chat template ends with the
token that begins the one or the other; where an answer must be JSON, it begins with a brace.
"""
import json
import os
import random
import shutil
import struct
import sys

CALL, ANSWER = "<|call|>", "<|answer|>"
CALLS = ["<think>", "\nOslo", " it is.\n", "</think>\n\n", "<tool_call>\n", '{"name": "weather", ', '"arguments": ', '{"city": "Oslo", ', '"days": 2}', "}\n</tool_call>",
         '\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>']
ANSWERS = ["It is ", "21 degrees."]
HIDDEN, FFN, BASE, EOS = 64, 64, 512, 2
BRACE = 3 + ord("{")  # the vocabulary has each byte at 3
TEMPLATE = """{#- </think> and <tool_call> show how it writes -#}
{%- for m in messages %}{{ m.role }}: {{ m.content + '\n' }}
{%- for c in m.tool_calls or [] %}{{ c.id }} {{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }} {{ v }}{% endfor %}{% endfor %}
{%- if m.role == 'tool' %}{{ m.tool_call_id }}{% endif %}{% endfor %}
{%- if messages[-1].role == 'tool' or not tools %}<|answer|>{% else %}{% for t in tools %}{{ t.function.name }} {% endfor %}<|call|>{% endif %}"""


def main(stories, into):
    os.makedirs(into, exist_ok=True)
    own = [CALL, *CALLS, ANSWER, *ANSWERS]
    ids = {text: BASE + i for i, text in enumerate(own)}
    follows = {}
    for chain in ([CALL, *CALLS], [ANSWER, *ANSWERS]):
        for a, b in zip(chain, [*chain[1:], None]):
            follows[ids[a]] = EOS if b is None else ids[b]
    vocab = BASE + len(own)

    with open(os.path.join(stories, "tokenizer.json")) as f:
        tokenizer = json.load(f)
    tokenizer["added_tokens"] += [{"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                                   "special": text in (CALL, ANSWER)} for text, i in ids.items()]
    with open(os.path.join(into, "tokenizer.json"), "w") as f:
        json.dump(tokenizer, f)
    shutil.copy(os.path.join(stories, "tokenizer_config.json"), into)
    with open(os.path.join(into, "chat_template.jinja"), "w") as f:
        f.write(TEMPLATE)
    with open(os.path.join(into, "config.json"), "w") as f:
        json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": HIDDEN, "intermediate_size": FFN,
                   "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 2048,
                   "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
                   "mlp_bias": False, "bos_token_id": 1, "eos_token_id": EOS, "torch_dtype": "float32"}, f)

    draw = random.Random(1)
    rows = [[draw.choice((-1.0, 1.0)) for _ in range(HIDDEN)] for _ in range(vocab)]
    head = [[0.0] * HIDDEN for _ in range(vocab)]
    for a, b in follows.items():
        head[b] = [x + y for x, y in zip(head[b], rows[a])]
    head[BRACE] = [x / 2 for x in rows[ids[ANSWER]]]
    zero = lambda n: [0.0] * n
    layer = "model.layers.0."
    tensors = {"model.embed_tokens.weight": ([vocab, HIDDEN], sum(rows, [])), "lm_head.weight": ([vocab, HIDDEN], sum(head, [])),
               "model.norm.weight": ([HIDDEN], [1.0] * HIDDEN), layer + "input_layernorm.weight": ([HIDDEN], [1.0] * HIDDEN),
               layer + "post_attention_layernorm.weight": ([HIDDEN], [1.0] * HIDDEN)}
    for name, out, width in (("self_attn.q_proj", 64, HIDDEN), ("self_attn.k_proj", 32, HIDDEN), ("self_attn.v_proj", 32, HIDDEN), ("self_attn.o_proj", HIDDEN, 64),
                             ("mlp.gate_proj", FFN, HIDDEN), ("mlp.up_proj", FFN, HIDDEN), ("mlp.down_proj", HIDDEN, FFN)):
        tensors[layer + name + ".weight"] = ([out, width], zero(out * width))
    header, data = {}, b""
    for name, (shape, values) in tensors.items():
        packed = struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(packed)]}
        data += packed
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(into, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
