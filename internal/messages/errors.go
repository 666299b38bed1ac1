package messages

import (
	"strings"

	"github.com/xpyd/xpyd/internal/chat"
	"github.com/xpyd/xpyd/internal/openai"
)

// Path is where messages are made; everything below it is of this API, too.
const Path = "/v1/messages"

// Owns reports whether a path is of this API.
func Owns(path string) bool { return path == Path || strings.HasPrefix(path, Path+"/") }

// Refusal is an error as the API has it: its status, and its body, which names the request unless that is "".
// What cannot be served now is the API's 529.
func Refusal(e *openai.Error, request string) (status int, body []byte) {
	status = e.Status
	kind := "invalid_request_error"
	switch {
	case status == 401:
		kind = "authentication_error"
	case status == 403:
		kind = "permission_error"
	case status == 404:
		kind = "not_found_error"
	case status == 413:
		kind = "request_too_large"
	case status == 429:
		kind = "rate_limit_error"
	case status == 503 || status == 529:
		status, kind = 529, "overloaded_error"
	case status == 504:
		kind = "timeout_error"
	case status >= 500:
		kind = "api_error"
	}
	body = append(append(append(body, `{"type":"error","error":{"type":"`...), kind...), `","message":`...)
	body = append(openai.AppendString(body, said(e)), '}')
	if request != "" {
		body = openai.AppendString(append(body, `,"request_id":`...), request)
	}
	return status, append(body, '}')
}

// said is an error's message, which has to name the field that is at fault.
func said(e *openai.Error) string {
	e = chat.OwnFields(chat.OwnTool(e, "input_schema"), names)
	name := e.Param
	if name == "" || strings.Contains(e.Message, name) {
		return e.Message
	}
	return name + ": " + e.Message
}

// names are this API's for a chat's fields.
var names = map[string]string{"max_completion_tokens": "max_tokens", "stop": "stop_sequences", "user": "metadata.user_id",
	"response_format": "output_config.format", "response_format.json_schema": "output_config.format", "response_format.json_schema.schema": "output_config.format.schema",
	"reasoning_effort": "output_config.effort", "parallel_tool_calls": "tool_choice"}
