package console

import (
	"bytes"
	"encoding/json"
	"errors"
	"reflect"
	"strings"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
)

// ReadBody reads the JSON object in the body of an admin request into v, a pointer to a struct. A
// key that v lacks is refused: it may be a misspelt one that was to prevent something. Unless it is
// needed, there may be no body.
func ReadBody(ctx *fasthttp.RequestCtx, v any, needed bool) *openai.Error {
	body := bytes.TrimSpace(ctx.PostBody())
	switch {
	case len(body) == 0 && needed:
		return openai.BadRequest("", "the body is empty: want a JSON object")
	case len(body) == 0:
		return nil
	}
	var keys map[string]json.RawMessage
	var wrong *json.UnmarshalTypeError
	err := json.Unmarshal(body, &keys)
	if err != nil && !errors.As(err, &wrong) {
		return openai.BadRequest("", "the body is no JSON object: %v", err)
	}
	if keys == nil { // "null" is no error
		return openai.BadRequest("", "want a JSON object, not %s", openai.Clip(string(body)))
	}
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.DisallowUnknownFields()
	err = dec.Decode(v)
	if err == nil {
		return nil
	}
	if name, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
		return openai.BadRequest(openai.Clip(strings.Trim(name, `"`)), "there is no key %s here", openai.Clip(name))
	}
	if errors.As(err, &wrong) {
		sent := wrong.Value
		if raw, ok := keys[wrong.Field]; ok {
			sent = string(raw)
		}
		return openai.BadRequest(openai.Clip(wrong.Field), "%s: want %s, not %s", openai.Clip(wrong.Field), wanted(wrong.Type), openai.Clip(sent))
	}
	return openai.BadRequest("", "read the body: %v", err)
}

// wanted says for people what JSON of a type is.
func wanted(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.String:
		return "a string"
	case reflect.Float32, reflect.Float64:
		return "a number"
	case reflect.Slice, reflect.Array:
		return "a list"
	case reflect.Struct, reflect.Map:
		return "an object"
	}
	return "a whole number such as 3"
}
