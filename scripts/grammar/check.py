"""Says which answers are not valid, for `go run ./scripts/bench answers`.

FILE has a JSON object a line: name, schema, and text, the answer. It prints a list of those
that are not JSON or not valid by the schema, formats too: name, text, why.
"""

import json
import sys

import jsonschema


def why(schema, text):
    try:
        value = json.loads(text)
    except ValueError as e:
        return f"no JSON: {e}"
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    checker = kind(schema, format_checker=kind.FORMAT_CHECKER)
    for error in checker.iter_errors(value):
        return f"{error.json_path}: {error.message[:300]}"
    return ""


wrong = []
for line in open(sys.argv[1], encoding="utf-8"):
    answer = json.loads(line)
    reason = why(answer["schema"], answer["text"])
    if reason:
        wrong.append({"Name": answer["name"], "Text": answer["text"], "Why": reason})
json.dump(wrong, sys.stdout)
