package chat_test

import (
	"testing"

	"github.com/xpyd/xpyd/internal/chat"
	"github.com/xpyd/xpyd/internal/openai"
)

// TestOwnFields: an error names fields as the API does that the client speaks.
func TestOwnFields(t *testing.T) {
	names := map[string]string{"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format", "response_format.json_schema.schema": "text.format.schema"}
	f := func(param, message, wantParam, want string) {
		t.Helper()
		given := openai.BadRequest(param, "%s", message)
		e := chat.OwnFields(given, names)
		if e.Param != wantParam || e.Message != want || given.Param != param || given.Message != message {
			t.Errorf("%s: %s", e.Param, e.Message)
		}
	}
	f("max_tokens", "max_tokens must be at least 1", "max_output_tokens", "max_output_tokens must be at least 1")
	f("", "lower max_tokens, or my_max_tokens", "", "lower max_output_tokens, or my_max_tokens")
	f("messages", "messages is required", "input", "input is required")
	f("messages", "the messages are too long", "input", "the messages are too long")
	f("regex", "regex and response_format both say what the answer must be", "regex", "regex and text.format both say what the answer must be")
	f("response_format.json_schema.schema", "response_format.json_schema.schema: at /type: no", "text.format.schema", "text.format.schema: at /type: no")
	f("max_output_tokens", "max_output_tokens must be", "max_output_tokens", "max_output_tokens must be")
}
