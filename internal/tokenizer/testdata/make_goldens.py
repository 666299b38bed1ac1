#!/usr/bin/env python3
"""Makes encode.jsonl.gz and chat.json.gz here, from the reference implementations.

    python3 -m venv v && v/bin/pip install tokenizers==0.23.3 jinja2==3.1.6
    v/bin/python make_goldens.py            # the committed files
    v/bin/python make_goldens.py 5000 FILE  # more random texts, to FILE

encode.jsonl.gz: Hugging Face tokenizers' ids of nasty texts, and texts of
random ids, for gpt2, smollm2, qwen3, stories260k and three variants made of
them. chat.json.gz: Jinja2's rendering, set up as transformers sets it up.
"""
import gzip, json, random, sys
from tokenizers import Tokenizer

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def load(name):
    path = name + ".json"
    try:
        raw = gzip.open(path + ".gz").read()
    except FileNotFoundError:
        raw = open(path, "rb").read()
    return json.loads(raw)


def variants():
    """name -> tokenizer.json; the tests make the same variants."""
    out = {n: load(n) for n in ("gpt2", "smollm2", "qwen3", "stories260k")}
    out["gpt2"]["truncation"] = None
    llama3 = load("smollm2")
    llama3["model"]["ignore_merges"] = True
    llama3["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}
    out["llama3"] = llama3
    for scheme, split in (("first", False), ("always", True)):
        m = load("stories260k")
        m["normalizer"] = None
        m["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}
        out["metaspace-" + scheme] = m
    added = load("gpt2")
    added["truncation"] = None
    for i, (c, kw) in enumerate([("<l>", {"lstrip": True}), ("<r>", {"rstrip": True}), ("<lr>", {"lstrip": True, "rstrip": True}),
                                 ("é!", {"normalized": True}), ("<lr>x", {}), ("word", {"single_word": True})]):
        added["added_tokens"].append({"id": added["model"]["vocab"].get(c, 50257 + i), "content": c, "single_word": False, "lstrip": False, "rstrip": False,
                                      "normalized": False, "special": i == 2, **kw})
    added["normalizer"] = {"type": "NFC"}
    out["added"] = added
    return out


ATOMS = [
    " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u00a0", "\u3000", "\u2028", "\x0b", "\x85", "\u200b", "\u200d", "\ufeff",
    "'s", "'S", "'t", "'RE", "'ve", "'m", "'LL", "'d", "'\u017f", "'", "''", "\u2019s", "it's", "I'LL", "don't",
    "0", "7", "12", "123", "1234", "12345678", "\u0661\u0662", "\u00bd", "\u2163", "\u00b2", "3.14", "1,000",
    "a", "Z", "the", " The", "hello", "World", "\u00e9", "e\u0301", "\u0041\u030a", "\ufb01", "\u017f", "\u212a", "\u1e9e",
    "\u4f60\u597d", "\u3053\u3093", "\ud55c\uae00", "\u0939\u093f\u0928\u094d\u0926\u0940", "\u0e20\u0e32\u0e29\u0e32", "\u05e9\u05dc\u05d5\u05dd", "\u0420\u0443\u0441",
    "\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "\U00020000", "\u2581", "\u2581\u2581", "\u0120", "\u010a", "\u00ad",
    "!", "?!", "...", "\u2026", "--", "==", "==>", "{}", "[[", "\\", "/", "//", "<", ">", "</", "<|", "|>", "$", "\u20ac", "+", "@", "#", "_", "__init__",
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>", "<think>", "</think>", "<tool_call>", "<|im_start", "<0x0A>", "<0xE2>",
    "<l>", "<r>", "<lr>", "word", "words", "\u00e9!", "e\u0301!", "<lr>x",
    "\x00", "\x01", "\x7f", "\x1b[0m", "aaaaaaaaaaaaaaaaaaaaaaaa", "abababababababababab", "supercalifragilistic",
    "http://a.b/c?d=e", "\uffff", "\ufffd", "\U0010ffff",
]
FIXED = ["", " ", "\n", "a" * 300, " " * 70, "ab" * 100, "\u4f60" * 80, "x\n\n\n  y", "  lead", "trail  ", "a  b   c", "\t\ttab",
         "'s's's", "1 2  3   4", "don't I'LL we'VE'D", "\r\n\r\n  \r\n", "a\u0301\u0301b", "<|im_start|>user\nhi<|im_end|>\n"]


def texts(n, rng):
    yield from FIXED
    for _ in range(n):
        yield "".join(rng.choice(ATOMS) for _ in range(rng.randint(1, 9)))


def encode(n, path):
    rng = random.Random(7)
    # Go's tables are of Unicode 15: no characters of later versions above.
    with gzip.GzipFile(path, "wb", mtime=0) as f:
        for name, spec in variants().items():
            tok = Tokenizer.from_str(json.dumps(spec))
            for text in texts(n, rng):
                ids = tok.encode(text).ids
                row = {"tok": name, "text": text, "ids": ids}
                f.write((json.dumps(row) + "\n").encode())
            size = tok.get_vocab_size()
            for i in range(n // 4):
                ids = [rng.randrange(size + 3) for _ in range(rng.randint(1, 12))]
                skip = i % 2 == 0
                out = tok.decode(ids, skip_special_tokens=skip)
                if "stories" in name or "meta" in name:
                    if "\ufffd" in out:  # a run of byte tokens that is not UTF-8: see Detokenizer
                        continue
                f.write((json.dumps({"tok": name, "ids": ids, "skip": skip, "decoded": out}) + "\n").encode())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        encode(int(sys.argv[1]), sys.argv[2])
    else:
        import chat_goldens
        encode(60, "encode.jsonl.gz")
        chat_goldens.main()
