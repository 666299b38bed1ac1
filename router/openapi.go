package router

import (
	"encoding/json"
	"strings"

	"github.com/xpyd/xpyd/internal/openai"
)

// openAPI describes the public listener as an OpenAPI document: its paths, from the table by which they
// are served, and the bodies of those that xpyd's own workers read, from the table of their fields.
func openAPI(version string, routes map[string]route) []byte {
	type object = map[string]any
	ref := func(name string) object { return object{"$ref": "#/components/schemas/" + name} }
	content := func(schema any) object { return object{"application/json": object{"schema": schema}} }
	paths, schemas := object{}, object{"Error": errorSchema(), "MessagesError": messagesErrorSchema()}
	for path, r := range routes {
		op := object{"summary": r.what, "operationId": strings.Trim(strings.Map(func(c rune) rune {
			if c == '/' || c == '.' || c == '_' {
				return '-'
			}
			return c
		}, path), "-")}
		ok := object{"description": "OK", "content": object{"application/json": object{}}}
		if schema := answers[path]; schema != nil {
			ok["content"] = content(schema)
		}
		if e, known := bodyOf(path); known {
			name := strings.TrimPrefix(strings.ReplaceAll(path, "/", "_"), "_")
			schemas[name] = bodySchema(e)
			op["requestBody"] = object{"required": true, "content": content(ref(name))}
			if e&(openai.OnCompletions|openai.OnChat) != 0 {
				ok["content"].(object)["text/event-stream"] = object{}
			}
		} else if path == "/v1/responses" || path == "/v1/messages" {
			op["description"] = "The fields are OpenAI's or Anthropic's: docs/apis.md."
			op["requestBody"] = object{"required": true, "content": object{"application/json": object{"schema": object{"type": "object"}}}}
			ok["content"].(object)["text/event-stream"] = object{}
		} else if r.method == "POST" {
			op["requestBody"] = object{"required": true, "content": object{"application/json": object{"schema": object{"type": "object"}}}}
		}
		wrong := content(ref("Error"))
		if strings.HasPrefix(path, "/v1/messages") { // their errors are Anthropic's
			wrong = content(ref("MessagesError"))
		}
		op["responses"] = object{"200": ok, "4XX": object{"description": "The request is at fault.", "content": wrong},
			"5XX": object{"description": "It cannot be served.", "content": wrong}}
		if r.key {
			op["security"] = []any{object{"key": []any{}}, object{}}
		}
		paths[path] = object{strings.ToLower(r.method): op}
	}
	for _, of := range named {
		_, name, _ := strings.Cut(of.path, "{")
		name, _, _ = strings.Cut(name, "}")
		at, _ := paths[of.path].(object)
		if at == nil {
			at = object{"parameters": []any{object{"name": name, "in": "path", "required": true, "schema": object{"type": "string"}}}}
			paths[of.path] = at
		}
		at[strings.ToLower(of.method)] = object{"summary": of.what, "security": []any{object{"key": []any{}}, object{}},
			"responses": object{"200": object{"description": "OK", "content": object{"application/json": object{}}},
				"4XX": object{"description": "There is none, or the request is at fault.", "content": content(ref("Error"))}}}
	}
	b, err := json.Marshal(object{"openapi": "3.1.0", "info": object{"title": "xpyd", "version": version}, "paths": paths,
		"components": object{"schemas": schemas, "securitySchemes": object{"key": object{"type": "http", "scheme": "bearer"}}}})
	if err != nil { // a schema of the table is no JSON, which its tests see
		panic(err)
	}
	return b
}

func bodyOf(path string) (openai.Endpoint, bool) {
	for _, e := range openai.Endpoints {
		if e.Path == path {
			return e.Of, true
		}
	}
	return 0, false
}

// bodySchema is what workers serve; null is as good as absent.
func bodySchema(e openai.Endpoint) any {
	required := map[openai.Endpoint][]string{openai.OnCompletions: {"prompt"}, openai.OnChat: {"messages"}, openai.OnDetokenize: {"tokens"}, openai.OnEmbeddings: {"input"}, openai.OnCohereEmbed: {"texts"}}[e]
	properties := map[string]any{}
	for _, f := range openai.RequestFields() {
		if f.On&e == 0 || f.Fate == openai.Refused || f.Fate == openai.Linked {
			continue
		}
		s := json.RawMessage(f.Schema)
		if must := len(required) > 0 && required[0] == f.Name; !must {
			s = json.RawMessage(`{"anyOf":[` + f.Schema + `,{"type":"null"}]}`)
		}
		if f.What != "" {
			s = json.RawMessage(strings.TrimSuffix(string(s), "}") + `,"description":` + string(openai.AppendString(nil, f.What)) + `}`)
		}
		properties[f.Name] = s
	}
	schema := map[string]any{"type": "object", "properties": properties}
	switch {
	case required != nil:
		schema["required"] = required
	case e == openai.OnTokenize:
		schema["oneOf"] = []any{map[string]any{"required": []string{"prompt"}}, map[string]any{"required": []string{"messages"}}}
	}
	return schema
}

func errorSchema() any {
	text := map[string]any{"type": "string"}
	maybe := map[string]any{"type": []string{"string", "null"}}
	return map[string]any{"type": "object", "required": []string{"error"}, "properties": map[string]any{"error": map[string]any{
		"type": "object", "required": []string{"message", "type", "param", "code"},
		"properties": map[string]any{"message": text, "type": text, "param": maybe, "code": maybe}}}}
}

// messagesErrorSchema is Anthropic's.
func messagesErrorSchema() any {
	text := map[string]any{"type": "string"}
	return map[string]any{"type": "object", "required": []string{"type", "error"}, "properties": map[string]any{"type": map[string]any{"const": "error"}, "request_id": text,
		"error": map[string]any{"type": "object", "required": []string{"type", "message"}, "properties": map[string]any{"type": text, "message": text}}}}
}
