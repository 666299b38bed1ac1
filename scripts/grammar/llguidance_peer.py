"""llguidance behind a pipe, for `go run ./scripts/bench grammar`.

It reads a JSON object a line and answers each with one. The first gives the vocabulary
(tokens: base64 of each token's bytes, null for a special token; end: an id). Then:

    {"op": "compile", "schema": TEXT, "space": REGEX or "", "all": BOOL}   {"error": TEXT or "", "us": N}
    {"op": "start"}                                           begins a text of the last schema
    {"op": "mask", "all": BOOL}                               {"bits": base64 of words if all, "us": N}
    {"op": "accept", "token": N}                              {"error": TEXT or ""}

us is the processor time of the call alone, in microseconds.
"""

import base64
import json
import sys
import time

import llguidance
import llguidance.numpy as masks


class Vocabulary:
    bos_token_id = None

    def __init__(self, tokens, end):
        self.eos_token_id = end
        self.special_token_ids = [i for i, t in enumerate(tokens) if t is None]
        self.tokens = [b"<special_%d>" % i if t is None else base64.b64decode(t) for i, t in enumerate(tokens)]
        self.by_bytes = {t: i for i, t in enumerate(self.tokens)}

    def __call__(self, text):  # greedy: nothing here depends on how a text is cut
        text, out = bytes(text, "utf-8") if isinstance(text, str) else bytes(text), []
        while text:
            n = next(n for n in range(min(len(text), 64), 0, -1) if text[:n] in self.by_bytes)
            out.append(self.by_bytes[text[:n]])
            text = text[n:]
        return out


def main():
    first = json.loads(sys.stdin.readline())
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Vocabulary(first["tokens"], first["end"])))
    bits = masks.allocate_token_bitmask(1, tokenizer.vocab_size)
    print(json.dumps({"vocabulary": tokenizer.vocab_size, "version": getattr(llguidance, "__version__", "")}), flush=True)
    grammar, matcher = None, None
    for line in sys.stdin:
        ask, say = json.loads(line), {}
        if ask["op"] == "compile":
            begin, error = time.thread_time_ns(), ""
            try:
                options = {"whitespace_pattern": ask["space"]} if ask["space"] else None
                grammar = llguidance.LLMatcher.grammar_from_json_schema(ask["schema"], overrides=options)
                if ask["all"]:  # also tokens other than those that a tokenizer would cut a forced text into
                    schema = json.loads(grammar)["grammars"][0]["json_schema"]
                    grammar = llguidance.LLMatcher.grammar_from_lark(
                        '%llguidance {"no_forcing": true}\nstart: %json ' + json.dumps(schema))
                matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
                error = matcher.get_error() if matcher.is_error() else ""
            except Exception as e:  # a panic, or no JSON
                error = str(e) or type(e).__name__
            say = {"us": (time.thread_time_ns() - begin) / 1000, "error": error}
        elif ask["op"] == "start":
            matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        elif ask["op"] == "mask":
            begin = time.thread_time_ns()
            masks.fill_next_token_bitmask(matcher, bits)
            say = {"us": (time.thread_time_ns() - begin) / 1000}
            if ask["all"]:
                say["bits"] = base64.b64encode(bits.tobytes()).decode()
        elif ask["op"] == "accept":
            ok = matcher.consume_token(ask["token"])
            say = {"error": matcher.get_error() if matcher.is_error() else "" if ok else "refused"}
        print(json.dumps(say), flush=True)


main()
