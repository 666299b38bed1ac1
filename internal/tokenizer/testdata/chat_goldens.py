"""Makes chat.json: renderings by Jinja2, set up as in transformers'
apply_chat_template. Called by make_goldens.py; with arguments, the cases of
render_all for the template files named, as JSON on standard output."""
import datetime, glob, gzip, json, os, sys
import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = datetime.datetime(2024, 7, 26, 9, 5, 3)


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = NOW.strftime
    return env


def render(source, variables):
    """Returns {"out": …} or {"err": the kind of error}."""
    try:
        return {"out": environment().from_string(source).render(**variables)}
    except jinja2.exceptions.TemplateSyntaxError as e:
        return {"err": "syntax", "msg": str(e)}
    except jinja2.exceptions.UndefinedError as e:
        return {"err": "undefined", "msg": str(e)}
    except jinja2.exceptions.TemplateError as e:
        return {"err": "raised", "msg": str(e)}
    except Exception as e:
        return {"err": "other", "msg": type(e).__name__ + ": " + str(e)}


TOOLS = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "The weather <now> & here, in 'any' \"city\" — é你",
        "parameters": {"type": "object", "properties": {
            "city": {"type": "string", "description": "name\nof it"},
            "unit": {"type": ["string", "null"], "enum": ["C", "F"]}, "days": {"type": "integer", "default": 1}},
            "required": ["city"]}}},
    {"type": "function", "function": {"name": "noop", "description": "", "parameters": {"type": "object", "properties": {}}}},
]
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2, "x": [1.5, None, True]}}}]}
TWO = {"role": "assistant", "content": "Let me look.", "tool_calls": [
    {"id": "call00002", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "A"}}},
    {"id": "call00003", "type": "function", "function": {"name": "noop", "arguments": {}}}]}
NONE = {"role": "assistant", "content": None, "tool_calls": CALL["tool_calls"]}


def user(s): return {"role": "user", "content": s}
def bot(s): return {"role": "assistant", "content": s}
def tool(s, i): return {"role": "tool", "content": s, "tool_call_id": i, "name": "get_weather"}


SYSTEM = {"role": "system", "content": "Be brief.\n"}
CHATS = {
    "one": [user("Hello")],
    "system": [SYSTEM, user("  Hi <there> & 'you' 你好 😀\n")],
    "turns": [SYSTEM, user("a"), bot("b"), user("c"), bot(" d\n"), user("e")],
    "ends with assistant": [user("a"), bot("b")],
    "think": [user("q"), bot("<think>\nhmm\n</think>\n\nanswer"), user("r"), bot("<think>more</think>last")],
    "reasoning": [user("q"), {"role": "assistant", "content": "x", "reasoning_content": "\nwhy\n"}, user("r"),
                  {"role": "assistant", "content": "y", "reasoning_content": "because"}],
    "tool": [user("weather?"), CALL, tool("{\"t\": 21}", "call00001")],
    "tool steps": [SYSTEM, user("weather?"), CALL, tool("21", "call00001"), TWO, tool("22", "call00002"), tool("ok", "call00003"),
                   bot("It is 21."), user("thanks")],
    "tool none": [user("weather?"), NONE, tool("21", "call00001"), bot("Fine.")],
    "tool response text": [user("q"), bot("<tool_call>x"), user("<tool_response>\n1\n</tool_response>")],
    "two users": [user("a"), user("b")],
    "no user": [SYSTEM],
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def render_all(source):
    out = []
    for name, messages in CHATS.items():
        for tools in (None, TOOLS):
            for prompt, kwargs in ((True, {}), (False, {}), (True, {"enable_thinking": False})):
                case = {"name": name, "messages": messages, "tools": tools, "prompt": prompt, "kwargs": kwargs}
                case |= render(source, {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt,
                                        **SPECIAL, **kwargs})
                out.append(case)
    return out


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    templates = {os.path.basename(p)[:-6]: open(p).read() for p in sorted(glob.glob(here + "/templates/*.jinja"))}
    templates["qwen3"] = json.load(open(here + "/qwen3.config.json"))["chat_template"]
    result = {name: render_all(source) for name, source in templates.items()}
    with gzip.GzipFile(here + "/chat.json.gz", "wb", mtime=0) as f:
        f.write(json.dumps(compacted(result)).encode())
    snippets = json.load(open(here + "/../jinja/testdata/snippets.json"))
    for s in snippets:
        for k in ("out", "err", "msg"):
            s.pop(k, None)
        s |= render(s["src"], s.get("vars", {}))
    with open(here + "/../jinja/testdata/snippets.json", "w") as f:
        json.dump(snippets, f, ensure_ascii=False, indent=1)
        f.write("\n")


def compacted(result):
    """Conversations and tools once, cases by name."""
    cases = [{"template": t, "chat": c["name"], "tools": c["tools"] is not None, "prompt": c["prompt"], "kwargs": c["kwargs"],
              **{k: c[k] for k in ("out", "err") if k in c}} for t, cs in result.items() for c in cs]
    return {"tools": TOOLS, "chats": CHATS, "special": SPECIAL, "cases": cases}


if __name__ == "__main__":
    cases = {}
    for path in sys.argv[1:]:
        cases[path] = render_all(open(path).read())
    json.dump(compacted(cases), sys.stdout)
