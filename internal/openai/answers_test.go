package openai_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/openai"
)

// TestErrors: status, type, code and text of every kind of error.
func TestErrors(t *testing.T) {
	f := func(err *openai.Error, text, want string) {
		t.Helper()
		if err.Error() != text {
			t.Errorf("have %q, want %q", err.Error(), text)
		}
		const head, tail = `{"error":{`, `}}`
		if got := string(err.Append([]byte("x"))); got != "x"+head+want+tail {
			t.Errorf("have %s", got)
		}
		if got := string(openai.AppendErrorEvent([]byte("x"), err)); got != "xdata: "+head+want+tail+"\n\n" {
			t.Errorf("have the event %q", got)
		}
	}
	const invalid, server = `"type":"invalid_request_error"`, `"type":"server_error"`
	f(openai.BadRequest("n", "%d", 1), "400 n: 1", `"message":"1",`+invalid+`,"param":"n","code":null`)
	f(openai.BadRequest("", "a").WithStatus(415, "media"), "415 a", `"message":"a",`+invalid+`,"param":null,"code":"media"`)
	f(openai.Unauthorized("%d", 1), "401 1", `"message":"1","type":"authentication_error","param":null,"code":"invalid_api_key"`)
	f(openai.NotFound("%d", 1), "404 1", `"message":"1",`+invalid+`,"param":null,"code":"not_found"`)
	f(openai.ModelNotFound("m"), `404 model: the model "m" does not exist`, `"message":"the model \"m\" does not exist",`+invalid+`,"param":"model","code":"model_not_found"`)
	long := strings.Repeat("m", 200)
	f(openai.ModelNotFound(long), `404 model: the model "`+long+`" does not exist`, `"message":"the model \"`+long+`\" does not exist",`+invalid+`,"param":"model","code":"model_not_found"`)
	f(openai.ModelNotFound(long+"m"), `404 model: the model "`+long+`…" does not exist`, `"message":"the model \"`+long+`…\" does not exist",`+invalid+`,"param":"model","code":"model_not_found"`)
	f(openai.TooLarge("%d", 1), "413 1", `"message":"1",`+invalid+`,"param":null,"code":"request_too_large"`)
	f(openai.AnswerTooLarge("n", "%d", 1), "400 n: 1", `"message":"1",`+invalid+`,"param":"n","code":"answer_too_large"`)
	f(openai.TooMany("%d", 1), "429 1", `"message":"1","type":"rate_limit_error","param":null,"code":"rate_limit_exceeded"`)
	f(openai.Internal("%d", 1), "500 1", `"message":"1",`+server+`,"param":null,"code":"internal_error"`)
	f(openai.InvalidOutput("%d", 1), "500 1", `"message":"1",`+server+`,"param":null,"code":"model_output_invalid"`)
	f(openai.Upstream("%d", 1), "502 1", `"message":"1",`+server+`,"param":null,"code":"engine_failed"`)
	f(openai.Unavailable("%d", 1), "503 1", `"message":"1",`+server+`,"param":null,"code":"unavailable"`)
	f(openai.Deadline("%d", 1), "504 1", `"message":"1",`+server+`,"param":null,"code":"deadline_exceeded"`)
}

// TestLists: the answers to /tokenize, /detokenize and /v1/models.
func TestLists(t *testing.T) {
	f := func(got []byte, want string) {
		t.Helper()
		if string(got) != want {
			t.Errorf("have %s\nwant %s", got, want)
		}
	}
	f(openai.AppendTokenized(nil, []int32{7, 8}, nil, 99), `{"count":2,"max_model_len":99,"tokens":[7,8],"token_strs":null}`)
	f(openai.AppendTokenized(nil, []int32{7, 8}, []string{"a", `"`}, 99), `{"count":2,"max_model_len":99,"tokens":[7,8],"token_strs":["a","\""]}`)
	f(openai.AppendTokenized(nil, nil, []string{}, 1), `{"count":0,"max_model_len":1,"tokens":[],"token_strs":[]}`)
	f(openai.AppendDetokenized(nil, "a\n"), `{"prompt":"a\n"}`)
	one := func(id, created string) string {
		return `{"id":"` + id + `","object":"model","created":` + created + `,"owned_by":"xpyd","root":"` + id + `","parent":null,"max_model_len":9}`
	}
	models := []openai.Model{{ID: "a", Created: 5, MaxModelLen: 9}, {ID: "b", Created: 6, MaxModelLen: 9}}
	f(openai.AppendModels(nil, nil), `{"object":"list","data":[]}`)
	f(openai.AppendModels(nil, models), `{"object":"list","data":[`+one("a", "5")+`,`+one("b", "6")+`]}`)
	f(openai.AppendModel(nil, models[0]), one("a", "5"))
}

// TestLongAnswer: a text that goes out in pieces is the same, with no character torn, and a
// failed write is the last.
func TestLongAnswer(t *testing.T) {
	for lead := range 4 { // so that pieces would end within a character
		text := strings.Repeat("x", lead) + strings.Repeat("🙂\"", 40_000)
		for _, chat := range []bool{false, true} {
			enc := openai.NewEncoder(openai.Meta{Chat: chat, ReturnTokenIDs: true})
			choices := []openai.Choice{{Text: text, TokenIDs: make([]int32, 70_000)}, {Index: 1, Text: "b"}}
			want := enc.AppendFull(nil, choices, openai.Usage{Prompt: 1})
			var got []byte
			pieces, largest := 0, 0
			write := func(b []byte) error {
				got, pieces, largest = append(got, b...), pieces+1, max(largest, len(b))
				return nil
			}
			if err := enc.WriteFull(write, choices, openai.Usage{Prompt: 1}); err != nil || !bytes.Equal(got, want) {
				t.Errorf("lead %d, chat %t: %v, another answer in pieces: %d bytes, want %d", lead, chat, err, len(got), len(want))
			}
			if pieces < 3 || largest > 256<<10 {
				t.Errorf("lead %d, chat %t: %d pieces, the largest of %d bytes", lead, chat, pieces, largest)
			}
			calls, broken := 0, errors.New("broken")
			if err := enc.WriteFull(func([]byte) error { calls++; return broken }, choices, openai.Usage{}); err != broken || calls != 1 {
				t.Errorf("a write fails: %v after %d calls", err, calls)
			}
			if again := enc.AppendFull(nil, choices, openai.Usage{Prompt: 1}); !bytes.Equal(again, want) {
				t.Error("the encoder does not write the same a second time")
			}
		}
	}
}

// TestEntries counts log probabilities.
func TestEntries(t *testing.T) {
	f := func(s openai.Shape, want int) {
		t.Helper()
		if got := s.Entries(); got != want {
			t.Errorf("%+v: %d, want %d", s, got, want)
		}
	}
	f(openai.Shape{Tokens: 5, Logprobs: -1, Prompt: 7, PromptLogprobs: -1}, 0)
	f(openai.Shape{Tokens: 5, Logprobs: 0, Prompt: 7, PromptLogprobs: -1}, 5)
	f(openai.Shape{Tokens: 5, Logprobs: 2, Prompt: 7, PromptLogprobs: -1}, 15)
	f(openai.Shape{Tokens: 5, Logprobs: 2, Prompt: 7, PromptLogprobs: -1, Echo: true}, 15+21)
	f(openai.Shape{Tokens: 5, Logprobs: -1, Prompt: 7, PromptLogprobs: -1, Echo: true}, 0)
	f(openai.Shape{Tokens: 5, Logprobs: -1, Prompt: 7, PromptLogprobs: 3}, 28)
}
